"""The one error of this package."""


class MeshError(ValueError):
    """A mesh, or a model on it, that cannot be; the text names the axis or tensor and the remedy."""
