//! Peak workspace and time of one MoE layer, whole and in chunks, with random weights:
//! `cargo run --release -p moe-tests --example chunked_moe [TOKENS]`. The sizes are the sizes of a model
//! with 0.9 billion weights: H = 1,024, 32 experts of I = 512, 4 per token, bf16.

use std::num::NonZeroUsize;
use std::time::Instant;

use candle_core::{DType, Device, Result};
use model_runtime::{DummyWeights, TensorSpec};
use moe_layer::{
    Activation, BlockContext, BlockOptions, Buffer, ChunkedMoe, Exec, RouterConfig, SparseMoeBlock,
    StepContext, TensorView, load_block_on,
};

const H: usize = 1024;
const I: usize = 512;
const E: usize = 32;

fn block(chunked_moe: ChunkedMoe) -> Result<SparseMoeBlock> {
    let specs = [
        TensorSpec::new("gate.weight", &[E, H]),
        TensorSpec::new("experts.gate_up_proj", &[E, 2 * I, H]),
        TensorSpec::new("experts.down_proj", &[E, H, I]),
    ];
    let vb = DummyWeights::new(specs, 0).var_builder(DType::BF16, &Device::Cpu);
    let options = BlockOptions {
        router: RouterConfig { renormalize: true, ..RouterConfig::new(E, 4) },
        hidden_size: H,
        intermediate_size: I,
        activation: Activation::SwiGlu,
        expert_bias: false,
        layer: 1,
        backend: None,
    };
    let context = BlockContext { chunked_moe, ..BlockContext::default() };
    load_block_on(&options, &context, vb.pp("gate"), vb.pp("experts")).map(|(block, _)| block)
}

fn main() -> Result<()> {
    let tokens = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(8192);
    let x = DummyWeights::new([TensorSpec::new("x", &[tokens, H])], 1)
        .var_builder(DType::BF16, &Device::Cpu)
        .get((tokens, H), "x")?;
    let whole = block(ChunkedMoe::default())?.chunk_bytes(tokens)?;
    let of = |n: usize| ChunkedMoe::of_size(NonZeroUsize::MIN.saturating_add(n - 1));
    println!("chunk   workspace MiB   s per layer");
    for chunked in [ChunkedMoe::default(), ChunkedMoe::within(whole / 8), of(256), of(64)] {
        let block = block(chunked)?;
        let mut ex = Exec::cpu();
        let mut out = Buffer::zeros(DType::F32, &[tokens, H])?;
        let mut seconds = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            let context = &mut StepContext::default();
            block.forward_into(TensorView::new(&x)?.view()?, out.view_mut(), context, &mut ex)?;
            seconds = seconds.min(start.elapsed().as_secs_f64());
        }
        let size = block.chunk_size().map_or("whole".to_string(), |n| n.to_string());
        println!("{size:>5} {:>15.1} {seconds:>13.3}", ex.workspace().bytes() as f64 / f64::from(1 << 20));
    }
    Ok(())
}
