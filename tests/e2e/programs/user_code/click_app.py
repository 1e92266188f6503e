"""A click command whose function captures the options."""

import click

from serverless_gpu import distributed


@click.group()
def app():
    pass


@app.command()
@click.option("--lr", default=1e-3, show_default=True)
@click.option("--layer", "layers", multiple=True, type=int)
@click.argument("name")
def train(lr, layers, name):
    @distributed(gpus=2, gpu_type="CPU", quiet=True)
    def fit(rank=0):
        return rank, name, lr * sum(layers)

    click.echo(fit.distributed())


if __name__ == "__main__":
    app()
