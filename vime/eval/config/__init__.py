"""The flags: their definitions, their validation, and the frozen config made of them."""

from vime.eval.config.errors import ConfigError
from vime.eval.config.parser import add_eval_arguments
from vime.eval.config.settings import EvalConfig
from vime.eval.config.validation import validate_eval_args

__all__ = ["ConfigError", "EvalConfig", "add_eval_arguments", "validate_eval_args"]
