"""A trainer class whose bound method runs on the ranks, with a callback, a super class and its own state."""

from serverless_gpu import distributed


class Base:
    def __init__(self, **settings):
        self.settings = settings
        self.history = []

    def log(self, **values):
        self.history.append(values)


class Trainer(Base):
    def __init__(self, callback, **settings):
        super().__init__(**settings)
        self.callback = callback

    def step(self, loss):
        self.log(loss=self.callback(loss))

    def fit(self, rank=0):
        for loss in range(self.settings["steps"]):
            self.step(loss + rank)
        return self


if __name__ == "__main__":
    trainer = Trainer(lambda loss: -loss, steps=2)
    fitted = distributed(gpus=2, gpu_type="CPU", quiet=True)(trainer.fit).distributed()
    assert [one.history for one in fitted] == [[{"loss": 0}, {"loss": -1}], [{"loss": -1}, {"loss": -2}]]
    assert all(isinstance(one, Trainer) for one in fitted) and trainer.history == []
    print("done")
