"""A study of Optuna: trials in threads, each one a run; the pruner gets the losses that the run has returned."""

import optuna

from serverless_gpu import distributed

optuna.logging.set_verbosity(optuna.logging.WARNING)


@distributed(gpus=1, gpu_type="CPU", quiet=True)
def train(params, epochs):
    x = 5.0
    losses = []
    for _ in range(epochs):
        x -= params["lr"] * 2 * (x - params["target"])
        losses.append((x - 2) ** 2)
    return losses


def objective(trial):
    params = {"lr": trial.suggest_float("lr", 1e-3, 0.5, log=True), "target": trial.suggest_int("target", 0, 4)}
    for step, loss in enumerate(losses := train.distributed(params, epochs=20)[0]):
        trial.report(loss, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return losses[-1]


if __name__ == "__main__":
    study = optuna.create_study(
        storage="sqlite:///study.db",
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    study.optimize(objective, n_trials=12, n_jobs=2)
    assert len(study.trials) == 12 and not study.get_trials(states=[optuna.trial.TrialState.FAIL])
    assert study.best_value < 4, study.best_value

    for _ in range(2):  # the other way: ask, a run for each, tell
        trials = [study.ask() for _ in range(2)]
        params = [{"lr": trial.suggest_float("lr", 1e-3, 0.5, log=True), "target": 2} for trial in trials]
        for trial, run in zip(trials, train.map(params, epochs=5)):
            study.tell(trial, run.result()[-1])
    assert len(study.trials) == 16
    print("done")
