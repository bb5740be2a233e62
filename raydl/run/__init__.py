"""One run on its driver: from its settings to its result.

``trainer`` starts everything and steps the controller. Before: ``preflight`` tries model and task,
``lock`` and ``driver_epoch`` keep other drivers out of the ``folder``, ``resume`` finds the state
to begin from. Meanwhile: ``recorder`` and ``progress_reporter`` show the controller's results;
``view`` gathers the ``status``, which ``control_channel`` exchanges for requests. Afterwards:
``check`` and ``evaluate``, from the folder alone.
"""
