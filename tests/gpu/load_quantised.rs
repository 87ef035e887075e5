//! Measures how fast a quantised checkpoint is loaded onto the device, packed by the device and by the host.
//! `tests/gpu/load.sh` runs it on a folder that `load_quantised.py` has written.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Result};
use model_families::qwen3_moe;
use model_runtime::{Checkpoint, RankView};
use moe_engine::{LoadOptions, ModelSpec};
use moe_kernels::cuda::Staging;
use moe_kernels::quant::{LogicalRows, QuantPart, QuantRows, QuantSource, StoredTensor};
use moe_kernels::{Exec, QuantScheme};
use moe_layer::BlockContext;
use rayon::prelude::*;

use crate::common::cuda;
use crate::load_bench::{bus, layout};

/// A reader that only provides rows.
struct RowsAlone<'a>(Box<dyn QuantRows + 'a>);

impl QuantRows for RowsAlone<'_> {
    fn shape(&self) -> (usize, usize) {
        self.0.shape()
    }
    fn scheme(&self) -> QuantScheme {
        self.0.scheme()
    }
    fn perm(&self) -> Option<&[u32]> {
        self.0.perm()
    }
    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        self.0.read(rows, out)
    }
}

/// A checkpoint of such readers, which the host packs.
#[derive(Debug)]
struct ByRows(RankView);

impl QuantSource for ByRows {
    fn scheme(&self, module: &str) -> Result<QuantScheme> {
        QuantSource::scheme(&self.0, module)
    }
    fn open(&self, module: &str) -> Result<Option<QuantPart<'_>>> {
        let part = QuantSource::open(&self.0, module)?;
        Ok(part.map(|part| QuantPart { rows: Box::new(RowsAlone(part.rows)), inputs: part.inputs }))
    }
    fn staging(&self, ex: &Exec) -> Result<Option<Arc<Staging>>> {
        QuantSource::staging(&self.0, ex)
    }
}

/// Loads the model as programs do. Returns the milliseconds for the headers, for comparing them with the config, and
/// for the rest, and the number of bytes that were read.
fn load(dir: &Path, by_rows: bool) -> ([f64; 3], u64) {
    let ms = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let start = Instant::now();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let opened = ms(start);
    let start = Instant::now();
    let config = qwen3_moe::read(&checkpoint.config).unwrap();
    let layout = || layout(&config, &|name| checkpoint.has(name));
    let expected = layout().tensors;
    checkpoint.verify(&expected, &[]).unwrap();
    let verified = ms(start);
    let start = Instant::now();
    let device = cuda().device().clone();
    let view = checkpoint.rank_view(&expected, layout().slices_for(&device));
    let quant: Arc<dyn QuantSource> =
        if by_rows { Arc::new(ByRows(view.clone())) } else { Arc::new(view.clone()) };
    let context = BlockContext { quant: Some(quant), ..BlockContext::default() };
    let options = LoadOptions { context, ..LoadOptions::default() };
    let model = config.load(&options, view.var_builder(DType::BF16, &device)).unwrap();
    cuda().synchronize().unwrap();
    let loaded = ms(start);
    drop(model);
    ([opened, verified, loaded], checkpoint.tensors.bytes_read())
}

/// Measures the host's part of a load alone: finding the experts' modules, and reading their integers with all threads
/// into memory that is already allocated.
fn print_parts(dir: &Path) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let config = qwen3_moe::read(&checkpoint.config).unwrap();
    let view = checkpoint.rank_view(&layout(&config, &|name| checkpoint.has(name)).tensors, Vec::new());
    let projections = ["gate_proj", "up_proj", "down_proj"];
    let experts = config.model.decoder.moe.as_ref().unwrap().router.num_experts;
    let module =
        |layer: usize, i: usize| format!("model.layers.{layer}.mlp.experts.{}.{}", i / 3, projections[i % 3]);
    let layers = config.model.decoder.num_layers();
    let names: Vec<_> = (0..layers).flat_map(|l| (0..3 * experts).map(move |i| module(l, i))).collect();
    let start = Instant::now();
    let parts: Vec<_> =
        names.par_iter().map(|name| QuantSource::open(&view, name).unwrap().unwrap()).collect();
    let opened = start.elapsed().as_secs_f64() * 1e3;
    let read = |buffer: &mut Vec<u8>, part: &QuantPart| {
        let (n, k) = part.rows.shape();
        let int4 = part.rows.scheme().bits() == 4;
        buffer.resize(if int4 { n * k / 2 } else { n * k }, 0);
        part.rows.stored().unwrap()[0].bytes.read_bytes(StoredTensor::Codes, 0, buffer).unwrap();
        buffer.len()
    };
    let start = Instant::now();
    let bytes: usize = parts.par_iter().map_init(Vec::new, read).sum();
    let rate = bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
    println!(
        "{} modules looked up in {opened:.0} ms, their integers read alone at {rate:.1} GB/s",
        names.len()
    );
}

#[test]
#[ignore = "needs a checkpoint that load_quantised.py has written; tests/gpu/load.sh runs it"]
fn a_quantised_load_runs_at_the_speed_of_the_bus() {
    let dir = PathBuf::from(std::env::var_os("LOAD_MODEL").expect("LOAD_MODEL: the folder of a checkpoint"));
    let print = |what: &str, ([opened, verified, loaded], bytes): ([f64; 3], u64)| {
        let bytes = bytes as f64;
        let all = opened + verified + loaded;
        println!(
            "{what}: headers {opened:.0} ms, compared {verified:.0}, loaded {loaded:.0} ({:.1} GB/s); in all {all:.0} ms, {:.1} GB/s",
            bytes / loaded / 1e6,
            bytes / all / 1e6
        );
    };
    println!("page-locked memory to device: {:.1} GB/s, {} threads", bus(), rayon::current_num_threads());
    // The first load reads files that nothing has read since they were written.
    for (what, by_rows) in [("device packs", false), ("device packs", false), ("host packs", true)] {
        print(what, load(&dir, by_rows));
    }
    print_parts(&dir);
}
