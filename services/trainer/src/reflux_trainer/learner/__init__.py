"""The learner process: model, optimizer and gradient accumulation behind LearnerService (torch)."""
