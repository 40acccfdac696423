"""Is the accumulated gradient that of the big batch, and if not, why: experiments on the user's own loop."""
