//! Checkpoints on a CUDA device: every tensor has the same bits as on the CPU, for any files, any dtype and any part
//! that a rank holds.

use std::fs;

use candle_core::{DType, Device, Result, Tensor};
use model_families::qwen3_moe;
use model_runtime::{Checkpoint, Geometry, ParallelConfig, RankView, TensorFiles, TensorSlice};
use moe_engine::ModelSpec;
use moe_experts::{ExpertWeights, LoadSpec};
use moe_kernels::cuda::Staging;
use moe_kernels::quant::{Opened, QuantPacking, QuantUse};
use moe_kernels::{Buffer, Exec, Weight};
use moe_tests::fixture;
use rayon::prelude::*;

use crate::common::{FLOATS, assert_error, cuda};

/// The bits of a tensor's elements, which f32 holds exactly.
pub fn bits(tensor: &Tensor) -> Vec<u32> {
    let host = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    host.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

fn assert_same(what: &str, cpu: &Tensor, gpu: &Tensor) {
    assert!(gpu.device().is_cuda(), "{what}");
    assert_eq!((cpu.dims(), cpu.dtype()), (gpu.dims(), gpu.dtype()), "{what}");
    let cpu = bits(cpu);
    let gpu = bits(gpu);
    let different = cpu.iter().zip(&gpu).position(|(c, g)| c != g);
    assert_eq!(different, None, "{what}: the first of {} elements that differs", cpu.len());
}

#[test]
fn every_tensor_has_the_bits_of_the_cpu() {
    for name in ["sharded", "packed-hub", "f16", "f32", "base", "odd-sizes"] {
        let files = TensorFiles::open_dir(fixture(name)).unwrap();
        for dtype in FLOATS {
            let cpu = files.var_builder(dtype, &Device::Cpu);
            let gpu = files.var_builder(dtype, cuda().device());
            for tensor in files.iter() {
                let load = |vb: &candle_nn::VarBuilder| vb.get(tensor.shape, tensor.name).unwrap();
                assert_same(&format!("{name} {} {dtype:?}", tensor.name), &load(&cpu), &load(&gpu));
            }
        }
    }
}

/// The packs of a layer's experts, as one rank loads them on a device.
fn packs(name: &str, geometry: &Geometry, layer: usize, dtype: DType, device: &Device) -> ExpertWeights {
    let checkpoint = Checkpoint::open(fixture(name)).unwrap();
    let config = qwen3_moe::read(&checkpoint.config).unwrap();
    let moe = config.model.decoder.moe.as_ref().unwrap();
    let layout = config.layout(geometry, &|name| checkpoint.tensors.info(name).is_some()).unwrap();
    let vb = RankView::new(checkpoint.tensors, layout.slices_for(device)).var_builder(dtype, device);
    let width = geometry.expert_intermediate(moe.intermediate_size).unwrap().range.len();
    let local = geometry.expert_layout(moe.router.num_experts).unwrap().local_experts;
    let spec = LoadSpec::new(moe.router.num_experts, config.model.decoder.hidden_size, width)
        .with_local_experts(local.into_iter().map(|id| id as usize).collect());
    ExpertWeights::load(&spec, vb.pp(format!("model.layers.{layer}.mlp.experts"))).unwrap()
}

#[test]
fn packs_of_every_rank_have_the_bits_of_the_cpu() {
    let ep = ParallelConfig { enable_expert_parallel: true, ..ParallelConfig::default() };
    for parallel in [
        ParallelConfig::default(),
        ParallelConfig { tp: 2, ..ParallelConfig::default() },
        ParallelConfig { dp: 2, ..ep },
        ParallelConfig { tp: 2, ..ep },
    ] {
        for (name, dtype) in [("sharded", DType::BF16), ("packed-hub", DType::F32), ("f16", DType::BF16)] {
            for rank in 0..parallel.world_size().unwrap() {
                let geometry = parallel.geometry(rank).unwrap();
                let load = |device: &Device| packs(name, &geometry, 1, dtype, device);
                let cpu = load(&Device::Cpu);
                let gpu = load(cuda().device());
                let rows = |weight: &Weight| weight.to_tensor().unwrap();
                for (pack, cpu, gpu) in [("w13", cpu.w13(), gpu.w13()), ("w2", cpu.w2(), gpu.w2())] {
                    let what = format!("{name} {pack} of {rank} in {parallel:?}");
                    assert_same(&what, &rows(cpu), &rows(gpu));
                }
            }
        }
    }
}

/// A tensor many times larger than all pinned buffers together, so that each buffer is used again and again. It is
/// loaded whole, by columns, and as a pack of pieces in another order.
#[test]
fn tensors_larger_than_all_buffers_arrive_whole() -> Result<()> {
    const ROWS: usize = 40_000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    // The loop counts in integers: in f32 a step of one is lost from 2^24 on, and the range would never end.
    let ramp =
        Tensor::arange(0u32, ROWS as u32 * 2048, &Device::Cpu)?.to_dtype(DType::F32)?.affine(1.37, -3e7)?;
    candle_core::safetensors::save(&[("x", ramp.reshape((ROWS, 2048))?)].into(), &path)?;
    let files = TensorFiles::open_file(&path)?;
    let piece = |rows: std::ops::Range<usize>| TensorSlice::renamed("pack", "x", &[rows, 0..2048]);
    let views: [&dyn Fn() -> Vec<TensorSlice>; 3] =
        [&Vec::new, &|| vec![TensorSlice::new("x", &[7..ROWS - 1, 300..1333])], &|| {
            vec![piece(20_000..ROWS), piece(3..4), piece(0..20_000)]
        }];
    for (view, (name, dims)) in
        views.iter().zip([("x", [ROWS, 2048]), ("x", [ROWS - 8, 1033]), ("pack", [ROWS + 1, 2048])])
    {
        for dtype in [DType::F32, DType::BF16] {
            let load = |device: &Device| {
                RankView::new(files.clone(), view()).var_builder(dtype, device).get(&dims[..], name)
            };
            assert_same(&format!("{name} {dims:?} {dtype:?}"), &load(&Device::Cpu)?, &load(cuda().device())?);
        }
    }
    Ok(())
}

/// Many threads share few buffers. If one thread cannot fill its buffer, the next one can.
#[test]
fn buffers_go_from_thread_to_thread() -> Result<()> {
    const LEN: usize = 1000;
    let staging = Staging::new(3, LEN, &cuda())?;
    let lens: Vec<usize> = (0..2000).map(|i| i * 389 % (LEN + 1)).collect();
    let mut out = Buffer::zeros_on(cuda().device(), DType::U8, &[lens.iter().sum()])?;
    let mut puts = Vec::new();
    let mut rest = out.view_mut();
    for (i, &len) in lens.iter().enumerate() {
        let (here, after) = rest.split_at(len)?;
        puts.push((i, here));
        rest = after;
    }
    let fails = |i: usize| i % 7 == 3;
    let done: Vec<bool> = puts
        .into_par_iter()
        .map(|(i, here)| {
            let fill = |bytes: &mut [u8]| {
                bytes.fill(i as u8);
                if fails(i) { candle_core::bail!("nothing to read") } else { Ok(()) }
            };
            staging.put(here, fill).is_ok()
        })
        .collect();
    let host = cuda().to_host(out.view())?;
    let mut got = host.view().cpu::<u8>()?;
    for (i, &len) in lens.iter().enumerate() {
        let (here, after) = got.split_at(len);
        let want = if fails(i) { 0 } else { i as u8 };
        assert!(here.iter().all(|&byte| byte == want), "piece {i} of {len} bytes");
        assert_eq!(done[i], !fails(i) || len == 0, "piece {i} of {len} bytes");
        got = after;
    }
    let mut long = Buffer::zeros_on(cuda().device(), DType::U8, &[LEN + 1])?;
    assert_error(staging.put(long.view_mut(), |_| Ok(())), &["expected at most 1000 bytes, got 1001"]);
    assert_error(Staging::new(1, LEN, &Exec::cpu()).map(|_| ()), &["staging"]);
    Ok(())
}

/// A file that is cut while it is open causes an error and no crash, and the next load works.
#[test]
fn files_that_cannot_be_read_are_errors() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let tensors = [
        ("a", Tensor::ones(1000, DType::F32, &Device::Cpu)?),
        ("b", Tensor::ones(3, DType::U32, &Device::Cpu)?),
    ];
    candle_core::safetensors::save(&tensors.into(), &path)?;
    let files = TensorFiles::open_file(&path)?;
    let vb = files.var_builder(DType::BF16, cuda().device());
    assert_error(vb.get(999, "a"), &["`a`", "expected shape [999], got [1000]"]);
    assert_error(vb.get(3, "b"), &["`b`", "U32", "cannot be loaded as bf16"]);
    assert_error(vb.get(3, "c"), &["`c` is missing"]);
    let len = fs::metadata(&path)?.len();
    fs::OpenOptions::new().write(true).open(&path)?.set_len(len - 2000)?;
    assert_error(
        vb.get(1000, "a"),
        &["model.safetensors is truncated", &format!("the file has {}", len - 2000)],
    );
    candle_core::safetensors::save(&[("a", Tensor::ones(1000, DType::F32, &Device::Cpu)?)].into(), &path)?;
    let again = TensorFiles::open_file(&path)?.var_builder(DType::BF16, cuda().device());
    assert_eq!(bits(&again.get(1000, "a")?), vec![1f32.to_bits(); 1000]);
    Ok(())
}

/// A cut file of quantised matrices; many threads read its bytes, and the device packs them.
#[test]
fn a_quantised_file_that_was_cut_is_an_error() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let copy = |name: &str| fs::copy(fixture("quant-fp8-block").join(name), dir.path().join(name));
    copy("config.json")?;
    copy("model.safetensors")?;
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let config = qwen3_moe::read(&checkpoint.config).unwrap();
    let layout = config.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
    let view = checkpoint.rank_view(&layout.tensors, Vec::new());
    let module = |expert: u32| vec![format!("model.layers.1.mlp.experts.{expert}.down_proj")];
    let modules: Vec<_> = (0..4).map(module).collect();
    let usage = QuantUse::RowParallel { segments: 1 };
    let pack = || Weight::quantised(&view, &modules, usage, DType::BF16, &cuda());
    let is_packed = |opened: Opened| matches!(opened, Opened::Packed(weight) if weight.packing() == Some(QuantPacking::Device));
    assert!(is_packed(pack()?));
    let header = u64::from_le_bytes(fs::read(&path)?[..8].try_into().unwrap()) + 8;
    fs::OpenOptions::new().write(true).open(&path)?.set_len(header)?;
    assert_error(pack().map(|_| ()), &["model.safetensors is truncated", &format!("the file has {header}")]);
    copy("model.safetensors")?;
    assert!(is_packed(pack()?));
    Ok(())
}
