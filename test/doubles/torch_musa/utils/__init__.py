"""Development tools of torch_musa, as far as torchada asks for them."""
