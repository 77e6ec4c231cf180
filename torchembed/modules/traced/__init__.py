"""Lookups while ``torch.compile`` or ``torch.export`` traces them."""
