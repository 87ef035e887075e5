//! A rank's view of a checkpoint: the right elements, and no others are read.

use candle_core::{DType, Device, Result, Tensor};
use model_runtime::{DummyWeights, RankView, TensorFiles, TensorSlice, TensorSpec};
use proptest::prelude::*;

use crate::message;

/// A file with `a` [4, 6, 5] and `b` [7], and the tensors.
fn files(dir: &tempfile::TempDir) -> (TensorFiles, Tensor, Tensor) {
    let ramp = |n: u32| Tensor::arange(0u32, n, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    let a = ramp(120).reshape((4, 6, 5)).unwrap();
    let b = ramp(7);
    let path = dir.path().join("x.safetensors");
    candle_core::safetensors::save(&[("a", a.clone()), ("b", b.clone())].into(), &path).unwrap();
    (TensorFiles::open_file(path).unwrap(), a, b)
}

proptest! {
    #[test]
    fn any_box_is_the_narrowed_tensor(cuts in prop::collection::vec((0usize..7, 0usize..7), 3), half: bool) {
        let dir = tempfile::tempdir().unwrap();
        let (files, a, _) = files(&dir);
        let ranges: Vec<_> = cuts
            .iter()
            .zip([4, 6, 5])
            .map(|(&(x, y), dim)| x.min(y).min(dim)..x.max(y).min(dim))
            .collect();
        let mut want = a;
        for (dim, range) in ranges.iter().enumerate() {
            want = want.narrow(dim, range.start, range.len()).unwrap();
        }
        let dtype = if half { DType::BF16 } else { DType::F32 };
        let view = RankView::new(files.clone(), [TensorSlice::new("a", &ranges)]);
        let got = view.var_builder(dtype, &Device::Cpu).get(want.dims(), "a").unwrap();
        prop_assert_eq!(got.dtype(), dtype);
        let flat = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        // candle cannot read a narrowed tensor without elements.
        prop_assert!(want.elem_count() == 0 || flat(&got) == flat(&want));
        prop_assert_eq!(got.dims(), want.dims());
        // f32 is four bytes.
        prop_assert_eq!(files.bytes_read() as usize, 4 * want.elem_count());
    }
}

#[test]
fn packs_are_shown_in_parts_and_the_rest_as_it_is() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (files, a, b) = files(&dir);
    let part = |name: &str, e: usize| TensorSlice::renamed(name, "a", &[e..e + 1, 1..3, 0..5]);
    let vb = RankView::new(files, [part("0.x", 2), part("1.x", 0)]).var_builder(DType::F32, &Device::Cpu);
    assert!(vb.contains_tensor("0.x") && vb.contains_tensor("b") && !vb.contains_tensor("a"));
    let want = a.get(2)?.narrow(0, 1, 2)?;
    // With or without the dimension of experts.
    assert_eq!(vb.get((2, 5), "0.x")?.to_vec2::<f32>()?, want.to_vec2::<f32>()?);
    assert_eq!(vb.get((1, 2, 5), "0.x")?.dims(), [1, 2, 5]);
    assert_eq!(vb.get(7, "b")?.to_vec1::<f32>()?, b.to_vec1::<f32>()?);
    let e = message(vb.get((3, 5), "1.x"));
    assert!(
        e.contains("`1.x`: expected the shape [3, 5], but this rank's part of `a` is [0..1, 1..3, 0..5]"),
        "{e}"
    );
    Ok(())
}

/// Parts of one name are a pack: under each other, in their order, whatever tensors they come from.
#[test]
fn parts_of_one_name_are_a_pack() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (files, a, _) = files(&dir);
    let weights = DummyWeights::new([TensorSpec::new("a", &[4, 6, 5])], 3);
    let random = weights.var_builder(DType::F32, &Device::Cpu).get((4, 6, 5), "a")?;
    let part = |e: usize, rows| TensorSlice::renamed("w13", "a", &[e..e + 1, rows, 1..4]);
    let parts = [part(2, 3..5), part(0, 0..2), part(2, 0..2), part(3, 4..6)];
    let views = [
        (RankView::new(files, parts.clone()), a),
        (RankView::new(DummyWeights::new([TensorSpec::new("a", &[4, 6, 5])], 3), parts), random),
    ];
    for (view, a) in views {
        let vb = view.var_builder(DType::F32, &Device::Cpu);
        assert!(vb.contains_tensor("w13") && !vb.contains_tensor("a"));
        let box_of = |e: usize, row: usize| a.get(e)?.narrow(0, row, 2)?.narrow(1, 1, 3);
        let want = Tensor::cat(&[box_of(2, 3)?, box_of(0, 0)?, box_of(2, 0)?, box_of(3, 4)?], 0)?;
        let got = vb.get((2, 4, 3), "w13")?;
        assert_eq!(got.reshape((8, 3))?.to_vec2::<f32>()?, want.to_vec2::<f32>()?);
        for dims in [[2, 4, 4], [2, 3, 4], [4, 2, 2]] {
            let e = message(vb.get(&dims[..], "w13"));
            assert!(e.contains("`w13`: expected the shape") && e.contains("4 parts like [1, 2, 3]"), "{e}");
        }
    }
    Ok(())
}

#[test]
fn boxes_outside_of_a_tensor_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (files, ..) = files(&dir);
    for ranges in [vec![0..4, 0..6], vec![0..5, 0..6, 0..5], vec![3..5, 0..6, 0..5]] {
        let dims: Vec<usize> = ranges.iter().map(|r: &std::ops::Range<usize>| r.len()).collect();
        let view = RankView::new(files.clone(), [TensorSlice::new("a", &ranges)]);
        let e = message(view.var_builder(DType::F32, &Device::Cpu).get(dims, "a"));
        assert!(e.contains("tensor `a` of shape [4, 6, 5] has no part"), "{e}");
    }
    let view = RankView::new(files, [TensorSlice::renamed("x", "none", std::slice::from_ref(&(0..1)))]);
    assert!(message(view.var_builder(DType::F32, &Device::Cpu).get(1, "x")).contains("none"));
}

#[test]
fn slices_of_random_weights_are_parts_of_the_whole() -> Result<()> {
    let weights = || DummyWeights::new([TensorSpec::new("w", &[6, 4])], 3);
    let whole = weights().var_builder(DType::F32, &Device::Cpu).get((6, 4), "w")?;
    let view = RankView::new(weights(), [TensorSlice::new("w", &[2..5, 1..3])]);
    let part = view.var_builder(DType::F32, &Device::Cpu).get((3, 2), "w")?;
    assert_eq!(part.to_vec2::<f32>()?, whole.narrow(0, 2, 3)?.narrow(1, 1, 2)?.to_vec2::<f32>()?);
    Ok(())
}
