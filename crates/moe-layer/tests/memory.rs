//! The memory of a model with many blocks is the memory of its weights and of one workspace, for any number of blocks.

#![cfg(target_os = "linux")]
// Helpers here may panic like the tests that call them.
#![allow(clippy::unwrap_used)]

use candle_nn::VarBuilder;
use moe_layer::candle::{Result, Tensor};
use moe_layer::{BlockOptions, DType, Device, RouterConfig, SparseMoeBlock, Workspace, load_block};

const BLOCKS: usize = 48;
const TOKENS: usize = 8192;
const HIDDEN: usize = 256;
const WIDTH: usize = 128;
const EXPERTS: usize = 8;

/// Returns a line of the process's status in bytes: `VmRSS` is the current memory, `VmHWM` the largest so far.
fn memory(key: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    let kib: usize = line.trim_matches([':', ' ', '\t']).strip_suffix(" kB").unwrap().parse().unwrap();
    kib << 10
}

fn block() -> Result<SparseMoeBlock> {
    let options = BlockOptions::new(RouterConfig::new(EXPERTS, 2), HIDDEN, WIDTH);
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    Ok(load_block(&options, vb.pp("gate"), vb.pp("experts"))?.0)
}

#[test]
fn many_blocks_take_their_weights_and_one_workspace() -> Result<()> {
    let mut hidden = Tensor::ones((TOKENS, HIDDEN), DType::F32, &Device::Cpu)?;
    // The first call allocates the threads of the pool and other memory that stays.
    block()?.forward(&hidden.narrow(0, 0, 16)?)?;
    let workspace = Workspace::of_thread(&Device::Cpu);
    workspace.trim();
    let before = memory("VmRSS");
    let blocks = (0..BLOCKS).map(|_| block()).collect::<Result<Vec<_>>>()?;
    blocks[0].forward(&hidden)?;
    let one = workspace.bytes();
    for block in &blocks {
        hidden = block.forward(&hidden)?;
    }
    assert_eq!(workspace.bytes(), one, "all blocks share one workspace");
    let weights = BLOCKS * (3 * EXPERTS * WIDTH + EXPERTS) * HIDDEN * 4;
    // These are the rows of a call and its result, next to the input of the first call.
    let rows = 3 * TOKENS * HIDDEN * 4;
    let taken = memory("VmHWM") - before;
    let most = (weights + one) * 21 / 20 + rows;
    println!("{} MiB of weights, {} MiB of workspace, {} MiB taken", weights >> 20, one >> 20, taken >> 20);
    assert!(taken <= most, "took {taken} bytes; expected at most {most}: weights {weights}, workspace {one}");
    Ok(())
}
