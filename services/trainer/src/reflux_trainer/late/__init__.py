"""Late rewards: groups that were trained on provisional rewards, and the correction samples that make up for them."""
