"""Training: a trainer (gradients, optimizer, schedule), its loop, and what makes a run go on after a restart.

    trainer.prepare(model, args) -> Trainer               wrap for data parallelism, make optimizer and schedule
    loop.run(trainer, data, forward, intervals, save, *, steps, evaluate=None, should_stop=None) -> bool
    state.save(trainer, folder), state.latest(folder), state.load(trainer, here)
    stopping.StopFile(env)                                the file by which the job asks for an early end

``data(split, consumed)`` gives this rank's micro-batches of ``train`` or ``valid``, from that sample on, endless.
``forward(model, batch)`` gives the output and a function of it: (loss sum, tokens, {name: (sum, tokens)}).
``save(trainer)`` writes a checkpoint; all ranks call it. ``evaluate(trainer)`` gives more values at each evaluation.
"""
