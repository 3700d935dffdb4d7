"""From a pretrained teacher to a student that starts as its exact copy."""

from regraft.convert.checkpoint import Checkpoint, open_checkpoint
from regraft.convert.convert import Choice, Output, convert, make_student
from regraft.convert.export import export_model
from regraft.convert.load import load_model, load_tokenizer
from regraft.convert.verify import compare, verify

__all__ = [
    "Checkpoint",
    "Choice",
    "Output",
    "compare",
    "convert",
    "export_model",
    "load_model",
    "load_tokenizer",
    "make_student",
    "open_checkpoint",
    "verify",
]
