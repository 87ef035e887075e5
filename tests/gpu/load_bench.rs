//! Measures how fast a checkpoint is loaded onto the device, compared with the rates of disk and bus:
//! `tests/gpu/load.sh`.
//!
//! The checkpoint has the shape of Qwen3-30B-A3B with fewer layers (`LOAD_LAYERS`). It was written just before, so it
//! comes out of the page cache. Two sizes separate the fixed cost of a load from the cost per byte.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{DType, Device};
use model_families::qwen3_moe;
use model_families::spec::DecoderSpec;
use model_runtime::{Config, Geometry, RankView, TensorFiles, TensorLayout, TensorSpec};
use moe_engine::{LoadOptions, ModelSpec};
use rayon::prelude::*;

use crate::common::cuda;
use crate::load::bits;
use crate::load_parts;

const CONFIG: &str = r#"{
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 4096, "tie_word_embeddings": false, "hidden_act": "silu",
    "torch_dtype": "bfloat16"
}"#;
/// The largest number of bytes in a shard.
const SHARD: usize = 2 << 30;
/// Bytes of one read, and the period of the random data.
const CHUNK: usize = 4 << 20;
const BLOCK: usize = 64 << 20;
/// The share of the slower rate of disk and bus that a load must reach.
const WANTED: f64 = 0.8;

/// Random bf16 numbers of moderate size.
fn random_block() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Sign and fraction are random, exponents are from 112 to 119.
        (state & 0x83ff_83ff_83ff_83ff) | 0x3800_3800_3800_3800
    };
    (0..BLOCK / 8).flat_map(|_| next().to_le_bytes()).collect()
}

/// Writes the tensors to shards with an index, in their order.
fn write(dir: &Path, tensors: &[TensorSpec]) -> std::io::Result<Vec<PathBuf>> {
    let block = random_block();
    let bytes = |t: &TensorSpec| 2 * t.shape.iter().product::<usize>();
    let mut shards = vec![Vec::new()];
    let mut filled = 0;
    for tensor in tensors {
        if filled + bytes(tensor) > SHARD {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes(tensor);
        shards.last_mut().expect("there is one").push(tensor);
    }
    let mut map = serde_json::Map::new();
    let mut paths = Vec::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        let mut header = serde_json::Map::new();
        let mut end = 0;
        for tensor in shard {
            let begin = end;
            end += bytes(tensor);
            let info =
                serde_json::json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]});
            header.insert(tensor.name.clone(), info);
            map.insert(tensor.name.clone(), name.clone().into());
        }
        let mut header = serde_json::to_vec(&header)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut file = File::create(dir.join(&name))?;
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        write_data(&file, 8 + header.len(), &block, number, end)?;
        paths.push(dir.join(name));
    }
    fs::write(dir.join("model.safetensors.index.json"), serde_json::json!({"weight_map": map}).to_string())?;
    Ok(paths)
}

/// Writes `len` bytes of data after a header, with all threads. Tensors at different places differ: within a shard
/// because its length is not a multiple of the block, and between two shards because they begin at different places of
/// the block.
fn write_data(file: &File, header: usize, block: &[u8], shard: usize, len: usize) -> std::io::Result<()> {
    (0..len.div_ceil(CHUNK)).into_par_iter().try_for_each(|chunk| {
        let mut at = chunk * CHUNK;
        let end = len.min((chunk + 1) * CHUNK);
        while at < end {
            let part = &block[(at + shard * 4099 * 2) % BLOCK..];
            let part = &part[..part.len().min(end - at)];
            file.write_all_at(part, (header + at) as u64)?;
            at += part.len();
        }
        Ok(())
    })
}

/// GB/s of `bytes` since `start`.
pub fn rate(bytes: usize, start: Instant) -> f64 {
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// The files in pieces of at most `len` bytes: where each begins, and its length.
pub fn pieces(files: &[File], len: usize) -> Vec<(&File, u64, usize)> {
    let of = |file| {
        let bytes = File::metadata(file).unwrap().len() as usize;
        (0..bytes.div_ceil(len)).map(move |i| (file, (i * len) as u64, len.min(bytes - i * len)))
    };
    files.iter().flat_map(of).collect()
}

/// GB/s of reading the files with all threads, 4 MiB at a time.
fn disk(files: &[File]) -> f64 {
    let chunks = pieces(files, CHUNK);
    let start = Instant::now();
    chunks.par_iter().for_each_init(
        || vec![0; CHUNK],
        |buffer, (file, at, len)| file.read_exact_at(&mut buffer[..*len], *at).unwrap(),
    );
    rate(chunks.iter().map(|(.., len)| len).sum(), start)
}

/// Writes the files to disk and makes the system drop their pages from memory.
fn forget(paths: &[PathBuf], files: &[File]) {
    files.iter().for_each(|file| file.sync_all().unwrap());
    for path in paths {
        let dd = std::process::Command::new("dd")
            .args([format!("if={}", path.display()).as_str(), "iflag=nocache", "count=0", "status=none"])
            .status();
        assert!(dd.expect("dd").success(), "dd iflag=nocache");
    }
}

/// GB/s of copies from page-locked memory to the device.
pub fn bus() -> f64 {
    const WORDS: usize = 64 << 20;
    let ex = cuda();
    let mut host = ex.pinned(WORDS).unwrap();
    let mut device = ex.zeros(DType::U32, &[WORDS]).unwrap();
    ex.upload(&mut host, device.view_mut()).unwrap();
    ex.synchronize().unwrap();
    let start = Instant::now();
    for _ in 0..16 {
        ex.upload(&mut host, device.view_mut()).unwrap();
    }
    ex.synchronize().unwrap();
    rate(16 * WORDS * 4, start)
}

/// Peak resident memory of this process since the last call, MB.
fn peak_memory() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kb = peak.and_then(|text| text.trim().trim_end_matches(" kB").parse::<f64>().ok());
    let _ = fs::write("/proc/self/clear_refs", "5"); // starts the peak anew
    kb.unwrap_or(f64::NAN) / 1e3
}

/// The layout of the model on one rank.
pub fn layout(config: &DecoderSpec, has: &(dyn Fn(&str) -> bool + Sync)) -> TensorLayout {
    config.layout(&Geometry::default(), has).unwrap()
}

/// The whole load of a model, as the programs do it: GB/s.
fn load(dir: &Path, config: &DecoderSpec) -> f64 {
    let start = Instant::now();
    let files = TensorFiles::open_dir(dir).unwrap();
    let layout = layout(config, &|name: &str| files.info(name).is_some());
    let device = cuda().device().clone();
    let vb = RankView::new(files.clone(), layout.slices_for(&device)).var_builder(DType::BF16, &device);
    let model = config.load(&LoadOptions::default(), vb).unwrap();
    cuda().synchronize().unwrap();
    let rate = rate(files.bytes_read() as usize, start);
    drop(model);
    rate
}

#[test]
#[ignore = "writes 8 GB and more; tests/gpu/load.sh runs it"]
fn a_load_runs_at_the_speed_of_disk_and_bus() {
    let root = std::env::var_os("LOAD_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = tempfile::tempdir_in(root).unwrap();
    let layers = std::env::var("LOAD_LAYERS").map_or(6, |text| text.parse().expect("LOAD_LAYERS: a number"));
    let config = CONFIG.replace("LAYERS", &layers.to_string());
    let config = qwen3_moe::read(&Config::parse(&config, "config.json").unwrap()).unwrap();
    let tensors = layout(&config, &|_| false).tensors;
    let start = Instant::now();
    let paths = write(dir.path(), &tensors).unwrap();
    let files: Vec<_> = paths.iter().map(|path| File::open(path).unwrap()).collect();
    let bytes: u64 = files.iter().map(|file| file.metadata().unwrap().len()).sum();
    println!(
        "{layers} layers: {} files, {} tensors, {:.2} GB, written in {:.1} s",
        paths.len(),
        tensors.len(),
        bytes as f64 / 1e9,
        start.elapsed().as_secs_f64()
    );

    let cold = std::env::var_os("LOAD_COLD").is_some();
    let prepare = || if cold { forget(&paths, &files) } else { _ = disk(&files) };
    prepare();
    let disk = disk(&files);
    let bus = bus();
    println!(
        "{}, {} threads: {disk:.1} GB/s; page-locked memory to device: {bus:.1} GB/s",
        if cold { "disk (files out of the page cache)" } else { "page cache (warm)" },
        rayon::current_num_threads()
    );
    let before = peak_memory();
    let rates = [(); 2].map(|()| {
        prepare();
        load(dir.path(), &config)
    });
    let slower = disk.min(bus);
    println!("peak host memory: {before:.0} MB before, {:.0} MB while loading", peak_memory());
    for (which, rate) in ["load", "load again"].iter().zip(rates) {
        let part = rate / slower;
        let ms = bytes as f64 / rate / 1e6;
        println!("{which}: {ms:.0} ms, {rate:.1} GB/s, {part:.2} of the slower of the two");
    }
    if !cold {
        load_parts::print(dir.path(), &config, &files);
    }

    let files = TensorFiles::open_dir(dir.path()).unwrap();
    let last = format!("model.layers.{}.mlp.experts.127.down_proj.weight", layers - 1);
    for name in [last.as_str(), "model.layers.2.self_attn.q_proj.weight"] {
        let on = |device: &Device| bits(&files.var_builder(DType::BF16, device).get_unchecked(name).unwrap());
        assert!(on(cuda().device()) == on(&Device::Cpu), "{name}");
    }
    // A program loads once, so the first load counts. For the page cache the result is only printed (docs/gpu.md says
    // why it is lower).
    let part = rates[0] / slower;
    assert!(!cold || part >= WANTED, "{part:.2} of the slower of disk and bus, wanted {WANTED}");
}
