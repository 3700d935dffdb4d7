"""The adapter between transformers models and lm-eval: never truncates, stops when answers are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM
from regraft.report.generate import Prompt, answer
from regraft.report.tasks import complete


class AnswersComplete(StoppingCriteria):
    """Ends each row of a batch once all its answers stand complete in what was generated.

    Args:
        tokenizer: decodes the generated tokens.
        answers: the values wanted, per row.
        start: position of the first generated token in the row.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, answers: list[list[str]], start: int) -> None:
        self.tokenizer, self.answers, self.start = tokenizer, answers, start
        self.done = [False] * len(answers)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **_: Any) -> torch.BoolTensor:
        """Rows `[B]` that are done, from `input_ids [B,T]`."""
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :], skip_special_tokens=True)
        for row, (text, values) in enumerate(zip(texts, self.answers, strict=True)):
            self.done[row] = self.done[row] or all(complete(value, text) for value in values)
        return torch.tensor(self.done, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


class NeedleLM(HFLM):
    """lm-eval's `HFLM` for needle documents: prompts are refused rather than truncated.

    Our own decoder generates through `regraft.report.generate`, any other model through its `generate`.

    Args:
        model: any transformers causal LM whose `generate` takes left padding and an attention mask.
        tokenizer: its tokenizer; a text gets exactly the special tokens that the tokenizer adds by itself.
        max_length: prompt and generated tokens together; None is the model's own limit, for our decoder none.
        answers: the values wanted, by the text the model reads.
        batch_size: documents generated at once.
        progress: called with the number of tokens just read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        max_length: int | None = None,
        answers: dict[str, list[str]],
        batch_size: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if max_length is None and isinstance(model, RegraftForCausalLM):
            max_length = 2**31  # a recurrent state has no end; its config only says what it was trained at
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            max_length=max_length,
            batch_size=batch_size,
        )
        self.answers, self.progress = answers, progress
        self._rows: list[list[str]] = []

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy completions in the order of the requests.

        Raises:
            UserError: a prompt and its budget exceed `max_length`; lm-eval would cut the prompt's beginning.
        """
        if not isinstance(self.model, RegraftForCausalLM):
            return super().generate_until(requests, disable_tqdm=disable_tqdm)
        texts = [request.args[0] for request in requests]
        prompts = []
        for text, ids, request in zip(texts, self.tokenizer(texts)["input_ids"], requests, strict=True):
            budget = request.args[1]["max_gen_toks"]
            self._refuse_truncation(len(ids), self.max_length - budget)
            prompts.append(Prompt(tuple(ids), tuple(self.answers[text]), budget))
        return answer(
            self.model, self.tokenizer, prompts, batch_size=int(self.batch_size), progress=self.progress
        )

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask `[B,T]` of one batch, left-padded.

        Raises:
            UserError: as in `generate_until`.
        """
        ids, mask = super().tok_batch_encode(strings, padding_side)
        if left_truncate_len is not None:
            self._refuse_truncation(ids.shape[1], left_truncate_len)
        self._rows = [self.answers[text] for text in strings]
        return ids, mask

    def _refuse_truncation(self, tokens: int, room: int) -> None:
        if tokens > room:
            raise UserError(
                "length",
                f"a prompt of {tokens} tokens leaves no room to generate within {self.max_length}",
                "evaluate at shorter lengths, or a model that reads more; prompts are never truncated",
            )

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        # `stop` is left out: it holds only the end-of-text token, which `generate` stops at by id, row by row
        kwargs = {k: v for k, v in generation_kwargs.items() if k != "temperature"}
        criterion = AnswersComplete(self.tokenizer, self._rows, context.shape[1])
        out = self.model.generate(
            input_ids=context,
            max_length=max_length,
            stopping_criteria=StoppingCriteriaList([criterion]),
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            use_cache=True,
            **kwargs | {"do_sample": False},
        )
        if self.progress:
            self.progress(int((context != self.tokenizer.pad_token_id).sum()))
        return out
