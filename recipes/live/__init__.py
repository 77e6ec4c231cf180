"""A model that is trained on while it is served: ``python -m recipes.serve <recipe> --live``."""
