"""Things worth saying once: a setting without effect, a shape that cannot be served as asked for."""

from accelerate.logging import get_logger

logger = get_logger(__name__)  # the main process speaks for all


class Notices:
    """Warnings by topic, each given at most once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def once(self, topic: str, message: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            logger.warning(message)
