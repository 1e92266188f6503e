"""Trees of XGBoost trained on the rows of two ranks, which meet through its tracker in the caller."""

import numpy as np
import xgboost
from sklearn.datasets import load_digits
from xgboost import collective
from xgboost.tracker import RabitTracker

from serverless_gpu import distributed


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train(worker_args, rank=0, world_size=1):
    images, labels = load_digits(return_X_y=True)
    with collective.CommunicatorContext(**worker_args):
        assert collective.get_world_size() == world_size
        rows = xgboost.DMatrix(images[rank::world_size], labels[rank::world_size])
        params = {"objective": "multi:softmax", "num_class": 10, "max_depth": 4, "nthread": 1, "device": "cpu"}
        history = {}
        booster = xgboost.train(params, rows, 5, evals=[(rows, "train")], evals_result=history, verbose_eval=False)
        return booster, history["train"]["mlogloss"][-1]


if __name__ == "__main__":
    tracker = RabitTracker(n_workers=2, host_ip="127.0.0.1")
    tracker.start()
    (first, loss), (second, other) = train.distributed(tracker.worker_args())
    tracker.wait_for()
    assert loss == other and first.save_raw("json") == second.save_raw("json"), "the ranks have one model"
    images, labels = load_digits(return_X_y=True)
    accuracy = np.mean(first.predict(xgboost.DMatrix(images)) == labels)
    assert accuracy > 0.9, accuracy
    print("done")
