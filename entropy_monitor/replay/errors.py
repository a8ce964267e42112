"""What can go wrong: the request (one line, nothing runs) or one checkpoint (the rest runs)."""


class ReplayError(Exception):
    """The request cannot be carried out; the message is the one line a person needs."""


class CheckpointError(Exception):
    """One checkpoint cannot be measured; the others can.

    Args:
        status: ``missing`` (not there), ``corrupt`` (there, not readable as weights of this model)
            or ``failed``.
        reason: One line that says what was found.
    """

    def __init__(self, status: str, reason: str) -> None:
        self.status = status
        self.reason = " ".join(str(reason).split())
        super().__init__(f"{status}: {self.reason}")
