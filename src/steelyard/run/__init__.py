"""The composition root: joins the stages into one run, in this process and its children."""
