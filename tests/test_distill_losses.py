"""Losses: known values, gradients against plain float64 formulas, splits, masks, packing, peak memory."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from folders import write_teacher

from regraft.convert import load_model, make_student
from regraft.distill.data import Rows
from regraft.distill.divergence import cross_entropy, forward_kl, head_loss, jsd, reverse_kl
from regraft.distill.head import head_losses
from regraft.distill.losses import Objective, trace
from regraft.distill.peak import PeakMemory
from regraft.distill.trainable import shares_prefix, trainable_names
from regraft.layers import BayesianLayer
from regraft.recipes.schema import JSD, BoundaryMSE, CrossEntropy, ForwardKL, LayerNMSE, ReverseKL

HEAD = (ForwardKL(), ReverseKL(), JSD(beta=0.3), CrossEntropy())
DISTILLATION = (LayerNMSE(), BoundaryMSE(), *HEAD[:-1])
ALL = (*DISTILLATION, CrossEntropy())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = write_teacher(tmp_path_factory.mktemp("losses") / "t", tokenizer=True, tie_word_embeddings=True)
    return load_model(str(folder)).requires_grad_(False), make_student(str(folder), [1, 2]).student


@pytest.fixture
def pair(models):
    """A teacher and its exact copy with Bayesian Layers at 1 and 2."""
    return models[0], copy.deepcopy(models[1])


def some_rows(rows=3, length=70, vocab=100, masked=()):
    ids = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(1))
    real = torch.ones(rows, length, dtype=torch.bool)
    real[1, 40:] = False
    for i in masked:
        real[i] = False
    first = torch.zeros_like(real)
    first[:, 0] = True
    return Rows(ids, real, first)


def gradients(student, teacher, losses, pieces, whole, layers=(1, 2), chunk=512):
    objective = Objective(losses, layers, True, logit_chunk=chunk)
    objective.measure(teacher, pieces)
    student.zero_grad()
    total = 0.0
    for rows in pieces:
        values = objective(student, teacher, rows, tokens=whole.tokens, targets=whole.targets)
        loss = torch.stack([values[loss.kind] for loss in losses]).sum()
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", DISTILLATION, ids=lambda loss: loss.kind)
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(pair, loss):
    teacher, _ = pair
    student = type(teacher)(teacher.config)
    student.load_state_dict(teacher.state_dict())
    rows = some_rows()
    value, grads = gradients(student, teacher, [loss], [rows], rows)
    assert value == 0.0
    assert grads and all(float(g.abs().max()) == 0.0 for g in grads.values())


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.kind)
def test_gradients_do_not_depend_on_the_split_into_micro_batches(pair, loss):
    teacher, student = pair
    set_evidence(student, 0.7)
    rows = some_rows(masked=[2])
    whole, expected = gradients(student, teacher, [loss], [rows], rows)
    assert whole > 0
    for size in (1, 2):
        value, grads = gradients(student, teacher, [loss], rows.split(size), rows)
        assert value == pytest.approx(whole, rel=1e-5)
        for name, g in grads.items():
            torch.testing.assert_close(
                g, expected[name], rtol=1e-3, atol=1e-6 * float(expected[name].abs().max() + 1)
            )


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.kind)
def test_a_fully_masked_batch_gives_zero_and_not_nan(pair, loss):
    teacher, student = pair
    set_evidence(student, 0.7)
    rows = some_rows(masked=[0, 1, 2])
    objective = Objective([loss], (1, 2), True)
    objective.measure(teacher, [some_rows()])
    value = objective(student, teacher, rows, tokens=0, targets=0)[loss.kind]
    value.backward()
    assert float(value.detach()) == 0.0
    assert all(bool((p.grad == 0).all()) for p in student.parameters() if p.grad is not None)


def test_losses_do_not_see_padding(pair):
    teacher, student = pair
    set_evidence(student, 1.0)
    rows = some_rows()
    changed = replace(rows, ids=torch.where(rows.real, rows.ids, 7))
    for loss in ALL:
        first, _ = gradients(student, teacher, [loss], [rows], rows)
        second, _ = gradients(student, teacher, [loss], [changed], changed)
        assert first == pytest.approx(second, rel=1e-6)


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.kind)
def test_documents_that_share_a_row_count_as_if_apart(pair, loss):
    teacher, student = pair
    set_evidence(student, 0.7)
    apart = some_rows(rows=4, length=30)
    together = Rows(apart.ids.view(2, 60), apart.real.view(2, 60), apart.first.view(2, 60))
    packed = together.to(torch.device("cpu"))
    assert packed.cu_seqlens is not None and packed.targets == together.targets == apart.targets
    first, expected = gradients(student, teacher, [loss], [apart], apart)
    second, found = gradients(student, teacher, [loss], [packed], packed)
    assert first == pytest.approx(second, rel=1e-5)
    for name, g in found.items():
        torch.testing.assert_close(
            g, expected[name], rtol=1e-3, atol=1e-5 * float(expected[name].abs().max() + 1)
        )


def plain(loss, s, t, labels):
    """Each head loss as its definition has it, in float64."""
    if loss.kind == "cross_entropy":
        return F.cross_entropy(s, labels, reduction="none")
    T = loss.temperature
    p, q = (t / T).softmax(-1), (s / T).softmax(-1)

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1) * T**2

    if loss.kind == "forward_kl":
        return kl(p, q)
    if loss.kind == "reverse_kl":
        return kl(q, p)
    m = loss.beta * p + (1 - loss.beta) * q
    return loss.beta * kl(p, m) + (1 - loss.beta) * kl(q, m)


CASES = [
    *(kind(temperature=T) for kind in (ForwardKL, ReverseKL) for T in (0.1, 1.0, 10.0)),
    *(JSD(beta=b, temperature=T) for b in (0.01, 0.5, 0.99) for T in (0.1, 1.0, 10.0)),
    CrossEntropy(),
]


@pytest.mark.parametrize("loss", CASES, ids=str)
def test_head_losses_against_their_definition_in_float64(loss):
    rng = torch.Generator().manual_seed(3)
    s = (2 * torch.randn(6, 11, generator=rng)).requires_grad_()
    t = 2 * torch.randn(6, 11, generator=rng)
    labels = torch.randint(11, (6,), generator=rng)
    value, gradient = head_loss(loss, s.detach(), t, labels)
    expected = plain(loss, s.double(), t.double(), labels)
    (reference,) = torch.autograd.grad(expected.sum(), s)
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [0.1, 1.0, 10.0])
def test_head_losses_are_finite_at_extreme_logits(T):
    s, t = torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([[-1e4, 1e4, 0.0]])
    for a, b in ((s, t), (t, s)):
        for found in (forward_kl(a, b, T), reverse_kl(a, b, T), jsd(a, b, 0.3, T)):
            assert all(bool(x.isfinite().all()) for x in found) and float(found[0]) >= 0
    assert float(jsd(s, t, 0.5, 1.0)[0]) == pytest.approx(torch.tensor(2.0).log().item())
    assert torch.isfinite(cross_entropy(s, torch.tensor([1]))[1]).all()


@pytest.mark.parametrize("loss", HEAD[:-1], ids=lambda loss: loss.kind)
def test_divergences_of_equal_bfloat16_logits_are_zero_and_of_near_ones_not_negative(loss):
    logits = (5 * torch.randn(50, 4000, generator=torch.Generator().manual_seed(0))).bfloat16()
    labels = torch.zeros(50, dtype=torch.long)
    value, gradient = head_loss(loss, logits, logits.clone(), labels)
    assert float(value.abs().max()) == 0.0 and float(gradient.abs().max()) == 0.0
    near, _ = head_loss(loss, logits.float() + 1e-5, logits.float(), labels)
    assert float(near.min()) >= 0 and float(near.max()) < 1e-5


@pytest.mark.parametrize("chunk", [1, 7, 4096])
@pytest.mark.parametrize("frozen_head", [True, False])
def test_the_head_in_chunks_against_all_logits_at_once_in_float64(chunk, frozen_head):
    rng = torch.Generator().manual_seed(5)
    h, th = torch.randn(2, 20, 8, generator=rng)
    W, tW = torch.randn(2, 31, 8, generator=rng)
    labels = torch.randint(31, (20,), generator=rng)
    h.requires_grad_()
    W.requires_grad_(not frozen_head)
    weights = torch.tensor([1.0, 0.5, 2.0, 0.1])
    sums = head_losses(HEAD, h, W, labels, teacher_h=th, teacher_head=tW, chunk=chunk)
    (sums * weights).sum().backward()
    s, t = h.double() @ W.double().T, th.double() @ tW.double().T
    expected = torch.stack([plain(loss, s, t, labels).sum() for loss in HEAD])
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-6)
    wanted = [h] if frozen_head else [h, W]
    for x, g in zip(wanted, torch.autograd.grad((expected * weights).sum(), wanted), strict=True):
        torch.testing.assert_close(x.grad, g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.kind)
def test_the_objective_against_plain_formulas_of_the_models_outputs(pair, loss):
    """Gradients of every parameter, from losses written down without chunks, prefixes and splits."""
    teacher, student = pair
    set_evidence(student, 0.7)
    rows = some_rows()
    _, found = gradients(student, teacher, [loss], rows.split(1), rows, chunk=11)
    student.zero_grad()
    seen = trace(teacher, rows, (1, 2))
    if loss.kind in ("layer_nmse", "boundary_mse"):
        mine = trace(student, rows, (1, 2))
        parts = []
        for i in (1, 2):
            if loss.kind == "layer_nmse":
                y, target = student.model.layers[i].attn(seen.mixer_in[i])[0], seen.mixer_out[i]
            else:
                y, target = mine.boundary[i], seen.boundary[i]
            variance = target[rows.real].double().var(0, correction=0).mean()
            error = (y.double() - target.double()).square().mean(-1)
            parts.append((error * rows.real).sum() / rows.tokens / variance)
        value = torch.stack(parts).mean()
    else:
        keep = rows.predicted
        s, t = (m(rows.ids).logits[:, :-1][keep].double() for m in (student, teacher))
        value = plain(loss, s, t, rows.ids[:, 1:][keep]).mean()
    value.backward()
    expected = dict(student.named_parameters())
    for name in trainable_names(student, "converted", (1, 2)):
        reference = expected[name].grad
        tolerance = 1e-5 * float(reference.abs().max()) + 1e-9
        torch.testing.assert_close(found[name], reference, rtol=2e-3, atol=tolerance)


def test_the_value_does_not_depend_on_the_number_of_tokens(pair):
    """Twice the same rows is the same mean, where a sum over a batch would double."""
    teacher, student = pair
    set_evidence(student, 0.7)
    rows = some_rows()
    twice = Rows(*(torch.cat([x, x]) for x in (rows.ids, rows.real, rows.first)))
    for loss in ALL:
        once, _ = gradients(student, teacher, [loss], [rows], rows)
        assert gradients(student, teacher, [loss], [twice], twice)[0] == pytest.approx(once, rel=1e-5)


def test_variances_are_those_of_the_whole_step_however_it_is_split(pair):
    teacher, _ = pair
    rows = some_rows(masked=[2])
    found = []
    for size in (1, 2, 3):
        objective = Objective([LayerNMSE(), BoundaryMSE()], (1, 2), True)
        objective.measure(teacher, rows.split(size))
        found.append(objective.variance)
    seen = trace(teacher, rows, (1, 2))
    for place, outputs in (("mixer", seen.mixer_out), ("boundary", seen.boundary)):
        expected = [float(outputs[i][rows.real].var(0, correction=0).mean()) for i in (1, 2)]
        for variance in found:
            assert variance[place] == pytest.approx(expected, rel=1e-5)


def blocks_run(model, call):
    """How often each block of a model runs."""
    count = [0] * len(model.model.layers)

    def counts(i):
        def hook(*_):
            count[i] += 1

        return hook

    hooks = [block.register_forward_hook(counts(i)) for i, block in enumerate(model.model.layers)]
    call()
    for hook in hooks:
        hook.remove()
    return count


def test_the_shared_prefix_runs_once_and_only_if_it_is_shared(pair):
    teacher, student = pair
    set_evidence(student, 0.7)
    rows = some_rows()
    converted = trainable_names(student, "converted", (1, 2))
    assert shares_prefix(student, teacher, (1, 2), converted)
    assert not shares_prefix(student, teacher, (1, 2), trainable_names(student, "all", (1, 2)))
    assert not shares_prefix(student, None, (1, 2), converted)
    values = {}
    for shared in (True, False):
        objective = Objective([ForwardKL(), BoundaryMSE()], (1, 2), shared)
        objective.measure(teacher, [rows])

        def run(shared=shared, objective=objective):
            values[shared] = objective(student, teacher, rows, tokens=rows.tokens, targets=rows.targets)

        ran = blocks_run(student, lambda run=run: blocks_run(teacher, run))
        assert ran == ([0, 1, 1, 1] if shared else [1, 1, 1, 1])
    for name, value in values[True].items():
        assert torch.equal(value, values[False][name])
    student.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
        student.model.layers[0].mlp.up_proj.weight.detach() + 1e-3
    )
    assert not shares_prefix(student, teacher, (1, 2), converted)


def test_layer_losses_stop_after_the_last_converted_layer(pair):
    teacher, student = pair
    rows = some_rows()
    objective = Objective([LayerNMSE(), BoundaryMSE()], (1, 2), True)
    objective.measure(teacher, [rows])

    def run():
        objective(student, teacher, rows, tokens=1, targets=1)

    assert blocks_run(teacher, run) == [1, 1, 1, 0] and blocks_run(student, run) == [0, 1, 1, 0]


def peak_of(loss, T, chunk, V=32000, d=16):
    rng = torch.Generator().manual_seed(0)
    h, th = torch.randn(2, T, d, generator=rng)
    W = torch.randn(V, d, generator=rng)
    labels = torch.randint(V, (T,), generator=rng)
    h.requires_grad_()
    with PeakMemory() as memory:
        head_losses([loss], h, W, labels, teacher_h=th, teacher_head=W, chunk=chunk)[0].backward()
    return memory.peak


@pytest.mark.parametrize("loss", HEAD, ids=lambda loss: loss.kind)
def test_peak_memory_of_head_losses_grows_with_the_chunk_and_not_with_the_tokens(loss):
    """V = 32000: all logits of T = 4096 tokens would be 524 MB for each of the two models."""
    logits = 4 * 32000  # bytes a token
    at_64 = peak_of(loss, 512, 64)
    assert peak_of(loss, 512, 128) > 1.8 * at_64
    assert peak_of(loss, 1024, 64) < 1.05 * at_64
    assert at_64 < 10 * 64 * logits


@pytest.mark.slow
def test_peak_memory_at_4096_tokens():
    assert peak_of(ForwardKL(), 4096, 128) < 8 * 128 * 4 * 32000 < 0.3 * 4096 * 4 * 32000


def set_evidence(model, level):
    for block in model.model.layers:
        if isinstance(block.attn, BayesianLayer):
            block.attn.evidence.data.fill_(level)


def test_every_loss_reaches_every_parameter_of_the_converted_layers(pair):
    teacher, student = pair
    set_evidence(student, 0.5)
    for loss in ALL:
        _, grads = gradients(student, teacher, [loss], [some_rows()], some_rows())
        for name in trainable_names(student, "converted", (1, 2)):
            assert float(grads[name].abs().sum()) > 0, (loss.kind, name)
