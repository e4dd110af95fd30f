"""The model code that learner and torch engine share: one functional forward over named tensors."""
