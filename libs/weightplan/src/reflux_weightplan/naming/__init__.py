"""Names and memory of other systems' tensors, translated to and from Hugging Face's."""
