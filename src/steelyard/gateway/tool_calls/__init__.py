"""Tool calls in sampled text: one parser for each form in which families of models write them."""
