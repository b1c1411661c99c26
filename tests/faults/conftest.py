"""The same model and thread as the trainer's tests."""

from tests.trainer.conftest import model, one_thread  # noqa: F401
