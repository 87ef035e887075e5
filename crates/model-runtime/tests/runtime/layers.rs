//! The small modules, against their definitions.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use half::bf16;
use model_runtime::layers::load_packed;
use model_runtime::{ArgumentError, Embedding, Exec, LmHead, RmsNorm, View, ViewMut};

use crate::message;

const CPU: Device = Device::Cpu;

#[test]
fn rms_norm_is_its_formula() -> Result<()> {
    let x = [0.5f32, -2.0, 3.0, 0.0, 0.0, 1.0];
    let norm = RmsNorm::new(Tensor::new(&[1f32, 2.0, -1.0], &CPU)?, 1e-3)?;
    let got = norm.forward(&Tensor::new(&x, &CPU)?.reshape((1, 2, 3))?)?;
    assert_eq!(got.dims(), [1, 2, 3]);
    for (r, row) in got.flatten_to(1)?.to_vec2::<f32>()?.iter().enumerate() {
        let x = &x[r * 3..][..3];
        let rms = (x.iter().map(|&x| (x as f64).powi(2)).sum::<f64>() / 3.0 + 1e-3).sqrt();
        for (i, w) in [1.0, 2.0, -1.0].into_iter().enumerate() {
            assert!((row[i] as f64 - x[i] as f64 / rms * w).abs() < 1e-6);
        }
    }
    // The residual form: residual += delta, out = norm(residual).
    let delta = [0.25f32, 1.0, -1.0];
    let mut residual = [0.5f32, -2.0, 3.0];
    let mut out = [0f32; 3];
    norm.add_forward_into(
        View::new(&delta, &[1, 3])?,
        ViewMut::new(&mut residual, &[1, 3])?,
        ViewMut::new(&mut out, &[1, 3])?,
        &mut Exec::cpu(),
    )?;
    assert_eq!(residual, [0.75, -1.0, 2.0]);
    assert_eq!(
        out.to_vec(),
        norm.forward(&Tensor::new(&[residual], &CPU)?)?.flatten_all()?.to_vec1::<f32>()?
    );
    Ok(())
}

#[test]
fn embedding_gathers_and_lm_head_projects() -> Result<()> {
    let table = Tensor::arange(0f32, 12.0, &CPU)?.reshape((4, 3))?.to_dtype(DType::BF16)?;
    let embedding = Embedding::new(table)?;
    let ids = Tensor::new(&[[3u32, 0], [1, 1]], &CPU)?;
    let got = Module::forward(&embedding, &ids)?;
    assert_eq!(got.dims(), [2, 2, 3]);
    let want = [9., 10., 11., 0., 1., 2., 3., 4., 5., 3., 4., 5.].map(bf16::from_f64);
    assert_eq!(got.flatten_all()?.to_vec1::<bf16>()?, want);
    assert!(message(embedding.forward(&Tensor::new(&[4u32], &CPU)?)).contains('4'));

    // Tied embeddings: the head shares the table. Its logits are f32.
    let head = LmHead::tied(&embedding);
    let hidden = Tensor::new(&[[1f32, 0.5, -1.0]], &CPU)?.to_dtype(DType::BF16)?;
    assert_eq!(head.forward(&hidden)?.to_vec2::<f32>()?, [[-1.5, 0.0, 1.5, 3.0]]);
    Ok(())
}

#[test]
fn packs_hold_their_parts_in_order() -> Result<()> {
    let t = |from: f32, dims: &[usize]| {
        Tensor::arange(from, from + dims.iter().product::<usize>() as f32, &CPU)?.reshape(dims)
    };
    let tensors = [
        ("q.weight", t(0.0, &[2, 3])?),
        ("k.weight", t(10.0, &[1, 3])?),
        ("q.bias", t(0.0, &[2])?),
        ("k.bias", t(7.0, &[1])?),
    ];
    let tensors = tensors.into_iter().map(|(n, t)| (n.to_string(), t)).collect();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
    let pack = load_packed(&vb, &[("q.weight", 2), ("k.weight", 1)], &[3])?;
    assert_eq!(pack.to_vec2::<f32>()?, [[0., 1., 2.], [3., 4., 5.], [10., 11., 12.]]);
    assert_eq!(load_packed(&vb, &[("q.bias", 2), ("k.bias", 1)], &[])?.to_vec1::<f32>()?, [0., 1., 7.]);
    assert!(message(load_packed(&vb, &[("q.weight", 3)], &[3])).contains("q.weight"));
    Ok(())
}

/// Wrong tensors of modules made by hand and of their calls: the error names the argument, what fits, what came.
#[test]
fn wrong_arguments_are_refused_by_name() -> Result<()> {
    let t = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &CPU);
    let norm = RmsNorm::new(t(&[3], DType::BF16)?, 1e-5)?;
    let embedding = Embedding::new(t(&[4, 3], DType::BF16)?)?;
    let head = LmHead::new(t(&[4, 3], DType::BF16)?)?;
    let cases = [
        (
            message(RmsNorm::new(t(&[3, 1], DType::F32)?, 1e-5)),
            "RMS norm: expected weight with dims [3], got [3, 1]",
        ),
        (
            message(RmsNorm::new(t(&[3], DType::I64)?, 1e-5)),
            "RMS norm: expected weight of dtype f32, bf16 or f16, got i64",
        ),
        (
            message(RmsNorm::new(t(&[3], DType::F32)?, f64::NAN)),
            "RMS norm: expected eps to be 0 or a positive number of f32, got NaN",
        ),
        (message(RmsNorm::new(t(&[3], DType::F32)?, -1e-5)), "expected eps to be 0 or a positive number"),
        (message(RmsNorm::new(t(&[3], DType::F32)?, 1e60)), "expected eps to be 0 or a positive number"),
        (
            message(norm.forward(&t(&[2, 4], DType::BF16)?)),
            "RMS norm: expected x with dims [.., 3], got [2, 4]",
        ),
        (message(norm.forward(&t(&[], DType::BF16)?)), "RMS norm: expected x with dims [.., 3], got []"),
        (
            message(norm.forward(&t(&[2, 3], DType::F16)?)),
            "RMS norm: expected x of dtype bf16 or f32, got f16",
        ),
        (
            message(Embedding::new(t(&[4], DType::F32)?)),
            "embedding: expected weight with 2 dimensions, got [4]",
        ),
        (
            message(Embedding::new(t(&[4, 3], DType::U8)?)),
            "embedding: expected weight of dtype f32, bf16 or f16, got u8",
        ),
        (
            message(embedding.forward(&t(&[2], DType::I64)?)),
            "embedding: expected token_ids of dtype u32, got i64",
        ),
        (
            message(LmHead::new(t(&[4, 3, 1], DType::F32)?)),
            "vocabulary projection: expected weight with 2 dimensions, got [4, 3, 1]",
        ),
        (
            message(head.forward(&t(&[2, 5], DType::BF16)?)),
            "vocabulary projection: expected hidden with dims [.., 3], got [2, 5]",
        ),
        (
            message(head.forward(&t(&[2, 3], DType::F32)?)),
            "vocabulary projection: expected hidden of dtype bf16, got f32",
        ),
    ];
    for (got, expected) in cases {
        assert!(got.contains(expected), "expected {expected:?} in {got:?}");
    }
    // A caller can match the error.
    let wrong = head.forward(&t(&[2, 5], DType::BF16)?).err();
    let argument = wrong.as_ref().and_then(moe_kernels::cause::<ArgumentError>);
    assert!(matches!(argument, Some(ArgumentError::Dims { name, .. }) if name == "hidden"));
    // No rows at all are sound.
    assert_eq!(norm.forward(&t(&[0, 3], DType::F32)?)?.dims(), [0, 3]);
    assert_eq!(head.forward(&t(&[0, 3], DType::BF16)?)?.dims(), [0, 4]);
    Ok(())
}

/// A tensor of a checkpoint that is absent or has another shape is named with its whole path.
#[test]
fn wrong_tensors_of_a_checkpoint_are_named() -> Result<()> {
    let tensors = [("a.weight", Tensor::zeros((4, 3), DType::F32, &CPU)?)];
    let tensors = tensors.into_iter().map(|(n, t)| (n.to_string(), t)).collect();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
    for (got, parts) in [
        (message(RmsNorm::load(3, 1e-5, vb.pp("absent"))), ["absent.weight", "cannot find"]),
        (message(RmsNorm::load(3, 1e-5, vb.pp("a"))), ["a.weight", "[4, 3]"]),
        (message(Embedding::load(4, 3, vb.pp("absent"))), ["absent.weight", "cannot find"]),
        (message(Embedding::load(5, 3, vb.pp("a"))), ["a.weight", "[4, 3]"]),
        (message(LmHead::load(4, 3, vb.pp("absent"))), ["absent.weight", "cannot find"]),
        (message(LmHead::load(4, 2, vb.pp("a"))), ["a.weight", "[4, 3]"]),
    ] {
        assert!(parts.iter().all(|part| got.contains(part)), "expected {parts:?} in {got:?}");
    }
    Ok(())
}
