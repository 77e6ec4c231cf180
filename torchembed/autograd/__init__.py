"""Where gradients are written and when: slots in flat buffers, deferred gradients of weights."""
