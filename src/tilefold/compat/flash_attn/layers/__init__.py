"""flash_attn.layers, of which there is `rotary`."""
