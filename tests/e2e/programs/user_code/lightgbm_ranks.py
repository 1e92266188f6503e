"""Gradient boosting with LightGBM: folds as ranks, callbacks, a custom metric, models that come back."""

import lightgbm
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold

from serverless_gpu import distributed

images, labels = load_digits(return_X_y=True)
PARAMS = {"objective": "multiclass", "num_class": 10, "num_leaves": 7, "verbosity": -1, "seed": 0}


def error_rate(predicted, data):
    return "error", float(np.mean(predicted.argmax(axis=1) != data.get_label())), False


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train_fold(rank=0, world_size=1):
    folds = StratifiedKFold(world_size, shuffle=True, random_state=0).split(images, labels)
    training, held_out = list(folds)[rank]
    data = lightgbm.Dataset(images[training], labels[training])
    history = {}
    booster = lightgbm.train(
        PARAMS,
        data,
        num_boost_round=15,
        valid_sets=[data.create_valid(images[held_out], labels[held_out])],
        feval=error_rate,
        callbacks=[lightgbm.early_stopping(5, verbose=False), lightgbm.record_evaluation(history)],
    )
    return booster, held_out, history["valid_0"]["error"][-1]


if __name__ == "__main__":
    results = train_fold.distributed()
    for booster, held_out, error in results:
        right = booster.predict(images[held_out]).argmax(axis=1) == labels[held_out]
        assert right.mean() > 0.85 and error < 0.2, (right.mean(), error)
    assert sorted(np.concatenate([held_out for _, held_out, _ in results])) == list(range(len(labels)))
    print("done")
