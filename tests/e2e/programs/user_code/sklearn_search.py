"""A search over models of scikit-learn: one run for each candidate, joblib workers in the ranks."""

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from serverless_gpu import as_completed, distributed

images, labels = load_digits(return_X_y=True)
CANDIDATES = {
    "forest": RandomForestClassifier(20, random_state=0, n_jobs=2),
    "linear": make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)),
}


@distributed(gpus=1, gpu_type="CPU", quiet=True)
def evaluate(name):
    scores = cross_val_score(CANDIDATES[name], images[:600], labels[:600], cv=2, n_jobs=2)
    return name, scores.mean(), CANDIDATES[name].fit(images[:600], labels[:600])


if __name__ == "__main__":
    runs = evaluate.map(list(CANDIDATES))
    for run in as_completed(runs):
        name, score, model = run.result()
        assert score > 0.8 and model.score(images[600:], labels[600:]) > 0.8, (name, score)
    print("done")
