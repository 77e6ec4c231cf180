"""Objects that belong to a parameter while it is in use and are not saved with it."""


class LeftBehind:
    """Base of what is attached to parameters as an attribute, and left behind where these are
    pickled or copied: an empty set stands for it there.

    That is a type which ``torch.load`` takes with ``weights_only=True``, its default.
    """

    def __reduce__(self) -> tuple[type[set[object]], tuple[()]]:
        return set, ()
