"""The error of models that cannot be taken apart."""


class DeployError(ValueError):
    """The model cannot be served or exported as it stands; the message says what to change."""
