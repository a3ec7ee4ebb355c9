"""Access to the engine's compiled programs, for the scripts that report or change how a step is compiled."""

from redrafter.runtime.compiled import Programs

from redrafter.engine import Engine


def is_recorded(engine: Engine) -> bool:
    """Return whether the engine runs its steps as CUDA graphs."""
    return engine.programs is not None and not engine.programs.hopeless


def compile_target_pass(engine: Engine, whole: bool = False) -> None:
    """Compile only the target's forward pass and record the rest of a step as it is; with `whole`, compile all.

    Compiling only the forward pass takes seconds instead of a minute. On a CPU this does nothing.
    """
    if engine.programs is not None:
        engine.programs = Programs(engine.target, engine.drafter, engine.rule, compiles=True, whole=whole)
