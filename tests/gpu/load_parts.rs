//! The parts of loading a checkpoint, each measured alone. `load_bench` prints them below the whole load.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Result};
use model_families::spec::DecoderSpec;
use model_runtime::{RankView, TensorFiles, TensorLayout};
use moe_kernels::cuda::Staging;
use moe_kernels::{Buffer, ViewMut};
use rayon::prelude::*;

use crate::common::cuda;
use crate::load_bench::{layout, pieces, rate};

const MIB: usize = 1 << 20;
/// Numbers of buffers and their bytes. The loader uses one of these pairs.
const STAGES: [(usize, usize); 7] =
    [(48, 2 * MIB), (16, 4 * MIB), (24, 4 * MIB), (32, 4 * MIB), (48, 4 * MIB), (16, 8 * MIB), (32, 8 * MIB)];

/// Prints the parts for the checkpoint in `dir`, whose shards are `files`.
pub fn print(dir: &Path, config: &DecoderSpec, files: &[File]) {
    headers(dir, config);
    device_memory(&sizes(layout(config, &|_| false)));
    locked_memory();
    stages(files);
}

/// Milliseconds that `work` takes, including all of the device's work, and its result.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let made = work();
    cuda().synchronize().unwrap();
    (start.elapsed().as_secs_f64() * 1e3, made)
}

fn headers(dir: &Path, config: &DecoderSpec) {
    let (opened, files) = timed(|| TensorFiles::open_dir(dir).unwrap());
    let (laid_out, _view) = timed(|| {
        let slices = layout(config, &|name| files.info(name).is_some()).slices_for(cuda().device());
        RankView::new(files.clone(), slices)
    });
    println!("headers: read {opened:.1} ms, laid out {laid_out:.1} ms");
}

/// Elements of the tensors that a load makes.
fn sizes(layout: TensorLayout) -> Vec<usize> {
    let mut packs = BTreeMap::<_, usize>::new();
    for slice in &layout.packs {
        *packs.entry(slice.name.as_str()).or_default() +=
            slice.ranges.iter().map(|r| r.len()).product::<usize>();
    }
    let packed: HashSet<_> = layout.packs.iter().map(|slice| slice.stored.as_str()).collect();
    let single = layout.tensors.iter().filter(|tensor| !packed.contains(tensor.name.as_str()));
    single.map(|tensor| tensor.shape.iter().product()).chain(packs.into_values()).collect()
}

fn device_memory(sizes: &[usize]) {
    let device = cuda().device().clone();
    let gb = sizes.iter().sum::<usize>() as f64 * 2. / 1e9;
    println!("device memory, {} allocations of {gb:.2} GB together:", sizes.len());
    let zeros = |n: &usize| Buffer::zeros_on(&device, DType::BF16, &[*n]);
    let unspecified = |n: &usize| Buffer::unspecified_on(&device, DType::BF16, &[*n]);
    for (what, make) in [
        ("unspecified", &unspecified as &dyn Fn(&usize) -> Result<Buffer>),
        ("zeroed", &zeros),
        ("unspecified", &unspecified),
    ] {
        let (made, buffers) = timed(|| sizes.iter().map(make).collect::<Result<Vec<_>>>().unwrap());
        let (freed, ()) = timed(|| drop(buffers));
        println!("  {what}: {made:.1} ms ({:.2} a GB), freed {freed:.1} ms", made / gb);
    }
}

fn locked_memory() {
    let pages = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    println!("page-locked memory (large pages: {}):", pages.trim());
    for mib in [32, 64, 96, 128] {
        let (made, staging) = timed(|| Staging::new(mib / 4, 4 * MIB, &cuda()).unwrap());
        let (freed, ()) = timed(|| drop(staging));
        let (by_driver, words) = timed(|| cuda().pinned(mib * MIB / 4).unwrap());
        let (freed_by_driver, ()) = timed(|| drop(words));
        println!(
            "  {mib} MiB: {made:.1} ms, freed {freed:.1} ms; allocated by the driver and written once \
             {by_driver:.1} ms, freed {freed_by_driver:.1} ms"
        );
    }
}

/// Fills buffers with pieces of the files by `read` and copies them to the device: GB/s.
fn staged(
    (count, len): (usize, usize),
    files: &[File],
    out: ViewMut<'_>,
    read: impl Fn(&File, u64, &mut [u8]) + Sync,
) -> f64 {
    let staging = Staging::new(count, len, &cuda()).unwrap();
    let mut rest = out;
    let mut loads = Vec::new();
    for (file, at, len) in pieces(files, len) {
        let (here, after) = rest.split_at(len).unwrap();
        loads.push((file, at, here));
        rest = after;
    }
    let bytes = loads.iter().map(|(.., here)| here.elem_count()).sum();
    let start = Instant::now();
    let load = |(file, at, here): (&File, u64, ViewMut)| {
        let fill = |buffer: &mut [u8]| {
            read(file, at, buffer);
            Ok(())
        };
        staging.put(here, fill).unwrap();
    };
    staging.read(|| loads.into_par_iter().with_max_len(1).for_each(load));
    cuda().synchronize().unwrap();
    rate(bytes, start)
}

fn stages(files: &[File]) {
    let bytes = pieces(files, MIB).iter().map(|(.., len)| len).sum();
    let mut out = Buffer::unspecified_on(cuda().device(), DType::U8, &[bytes]).unwrap();
    let read = |file: &File, at, buffer: &mut [u8]| file.read_exact_at(buffer, at).unwrap();
    println!("from files to one allocation, GB/s (copies of what the buffers hold; read and copied):");
    for (count, len) in STAGES {
        let copied = staged((count, len), files, out.view_mut(), |_, _, _| ());
        let both = staged((count, len), files, out.view_mut(), read);
        println!("  {count} buffers of {} MiB: {copied:.1}; {both:.1}", len / MIB);
    }
    drop(out);
    println!("read into page-locked memory, not copied: {:.1} GB/s", read_alone(files));
}

/// GB/s of reading alone, into page-locked memory: pieces of 4 MiB, with one buffer for each of the threads' tasks.
fn read_alone(files: &[File]) -> f64 {
    let pieces = pieces(files, 4 * MIB);
    let threads = rayon::current_num_threads();
    let mut buffers: Vec<_> = (0..threads).map(|_| cuda().pinned(MIB).unwrap()).collect();
    let start = Instant::now();
    buffers.par_iter_mut().enumerate().with_max_len(1).for_each(|(thread, words)| {
        let buffer = bytemuck::cast_slice_mut(words.wait().unwrap());
        for (file, at, len) in pieces.iter().skip(thread).step_by(threads) {
            file.read_exact_at(&mut buffer[..*len], *at).unwrap();
        }
    });
    rate(pieces.iter().map(|(.., len)| len).sum(), start)
}
