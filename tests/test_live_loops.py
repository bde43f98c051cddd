"Loops of other libraries around live weights: Lightning's automatic optimization, and a loop as skorch writes it"
import pytest,torch
from fastsparse.all import *
from functools import partial
from helpers import *
from torch import nn

# --- Lightning

def lit(live, opt, folder, method, manual=False, **kwargs):
    L = pytest.importorskip('lightning')
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers,self.automatic_optimization = mlp((6,16,12,3)),not manual
        def training_step(self, batch, i):
            loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
            if not manual: return loss
            o = self.optimizers()
            o.zero_grad()
            self.manual_backward(loss)
            o.step()
        def configure_optimizers(self):
            o = opt(self.parameters())
            return dict(optimizer=o, lr_scheduler=dict(scheduler=torch.optim.lr_scheduler.StepLR(o, 5, .5), interval='step')) if not manual else o
    net = Net()
    sparsify_model(net.layers, .6, seed=0)
    if live: go_live(net.layers)
    x,y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)),torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    every = {} if method=='static' else dict(batches_per_update=3)
    cbs = [SparseLightningCallback(method=method, seed=0, sparse_compute=None if live else False, **every)] if method else []
    seen = []
    class Watch(L.Callback):
        def on_train_batch_end(self, *args): seen.append(is_live(net.layers[0].weight))
    trainer = L.Trainer(max_epochs=3, accelerator='cpu', logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=folder, callbacks=[*cbs, Watch()], **kwargs)
    trainer.fit(net, dl)
    assert seen[0]==live
    net.layers(x)
    return net.layers

litopts = dict(sgd=partial(torch.optim.SGD, lr=.05, momentum=.9), adamw=partial(torch.optim.AdamW, lr=.01))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('how', ['automatic','manual','accumulated','clipped'])
@pytest.mark.parametrize('method,opt', [(None,'sgd'),('static','sgd'),('static','adamw'),('rigl','sgd'),('rigl','adamw')])
def test_lightnings_loop(how, method, opt, tmp_path):
    "Its closure clears gradients through the optimizer, inside of the step: live is masked, and automatic is manual"
    kwargs = dict(accumulated=dict(accumulate_grad_batches=2), clipped=dict(gradient_clip_val=.1)).get(how, {})
    a,b = [lit(live, litopts[opt], tmp_path, method, how=='manual', **kwargs) for live in (True,False)]
    for o,q in zip(masked_params(a), masked_params(b)): assert o.mask.equal(q.mask)
    for p,q in zip(a.parameters(), b.parameters()): torch.testing.assert_close(dense_of(p), q.detach(), **in_float_layers)

# --- as skorch: a step function inside of `optimizer.step(step_fn)`

@pytest.mark.parametrize('opt', litopts)
@pytest.mark.parametrize('method', [None,'static','rigl'])
def test_a_loop_as_skorch_writes_it(method, opt):
    "`optimizer_.zero_grad(set_to_none=True)`, loss, backward and callbacks inside of the closure; the loss comes from it"
    out = []
    for live in (True,False):
        m = mlp((6,16,12,3))
        sparsify_model(m, .6, seed=0)
        o = litopts[opt](m.parameters())
        if live: go_live(m, o)
        every = {} if method=='static' else dict(batches_per_update=4)
        if method: DynamicSparseTraining(m, o, 40, method=method, seed=0, sparse_compute=None if live else False, **every)
        x,y = data(m, 32)
        losses = []
        for i in range(15):
            acc = {}
            def step_fn():
                o.zero_grad(set_to_none=True)
                loss = nn.functional.mse_loss(m(x+.01*i), y)
                loss.backward()
                acc['loss'] = loss.detach()
                return loss
            o.step(step_fn)
            losses.append(acc['loss'].item())
        out.append(losses)
    assert out[0]==pytest.approx(out[1], abs=1e-5)
