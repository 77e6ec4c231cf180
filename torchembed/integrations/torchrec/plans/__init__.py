"""TorchRec's plans and settings: what torchembed makes of them, and which it supports."""
