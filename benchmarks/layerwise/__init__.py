"""A deep float16 network that layer-wise loss scales train and no single scale does."""
