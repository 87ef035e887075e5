//! Products whose activations are quantised to FP8 because their weights are FP8, compared with the definition:
//! `quantised_to_fp8`, then f64.

use candle_core::DType;
use moe_kernels::cuda::{ExpertEpilogue, MonolithicExperts, monolithic_experts_into};
use moe_kernels::half::bf16;
use moe_kernels::plan::{Form, Fp8Activations, LinearCall, LinearForm, MonolithicForm};
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    Buffer, Exec, Gate, GateScoring, LayerRouting, PreNorm, ProductRows, QuantGroup, QuantScheme, SublayerIo,
    View, add_into, linear_add_into, linear_into, quantised_to_fp8,
};

use super::matrices::{Matrix, Source, fp8, int};
use super::sum_bound;
use crate::common::*;
use crate::definition::{product, relative_error};
use crate::packs::Packs;

const BLOCK: QuantGroup = QuantGroup::Block { n: 128, k: 128 };

fn schemes() -> [QuantScheme; 3] {
    [BLOCK, QuantGroup::Channel, QuantGroup::Tensor].map(fp8)
}

fn on() -> Exec {
    cuda().with_fp8_activations(Fp8Activations::On)
}

fn gate(weight: View<'_>, top_k: usize) -> Gate<'_> {
    Gate {
        weight,
        bias: None,
        correction_bias: None,
        top_k,
        shared: 0,
        shared_weight: 1.0,
        scoring: GateScoring::Softmax,
        raw_logits: false,
        groups: None,
        renormalize: true,
        scale: 1.0,
        softcap: None,
        padded: false,
        routing: LayerRouting::default(),
        log2phy: None,
    }
}

/// Few rows stay in 16 bits, and more rows are multiplied with the pack. Of many rows, all but the last three are
/// multiplied with the weights written out as rows, and these three are a separate product. The blocks of stacked
/// matrices need not be blocks of the whole.
#[test]
fn dense_products_quantise_their_rows() {
    let mut rng = Rng::new();
    let few = [(9, vec![128], 128), (70, vec![160], 256), (131, vec![256], 384)];
    let many = [(512, vec![256], 384), (1031, vec![128, 256], 256), (515, vec![64, 64], 256)];
    let sizes = few.into_iter().chain(many).collect::<Vec<_>>();
    for (m, parts, k) in small(sizes, 128, |size| size.0) {
        for scheme in schemes() {
            let n = parts.iter().sum();
            let mut source = Source::default();
            let mut floats = Vec::new();
            let names: Vec<String> = (0..parts.len()).map(|i| i.to_string()).collect();
            for (name, rows) in names.iter().zip(&parts) {
                let matrix = Matrix::new(&mut rng, *rows, k, scheme, 1);
                floats.extend(matrix.floats());
                source.matrices.insert(name.clone(), matrix);
            }
            let p = Place::new(cuda());
            let mut ex = on();
            let weight = source.weight(&[&names], QuantUse::Linear, DType::BF16, &cuda());
            let bias = rng.floats(DType::BF16, &[n]);
            // Rows of many magnitudes, zeros, and a number that is smaller than any scale.
            let of_row = |i: usize| if m < 48 { 1.0 } else { 2f32.powi((i / k * 7 % 41) as i32 - 20) };
            let mut x: Vec<f32> = (0..m * k).map(|i| rng.float() * of_row(i)).collect();
            x[..k / 2].fill(0.0);
            x[m * k - 1] = f32::MIN_POSITIVE;
            let x = Buffer::from_vec(x.into_iter().map(bf16::from_f32).collect(), &[m, k]).unwrap();
            for bias in [None, Some(&bias)] {
                let quant = weight.quantisation();
                let bf16 = DType::BF16;
                let call =
                    LinearCall { rows: m, n, k, dtype: bf16, quant, bias: bias.is_some(), aligned: true };
                let in_blocks =
                    scheme != fp8(QuantGroup::Channel) && parts.iter().all(|rows| rows % 128 == 0);
                let form = match m {
                    ..48 => LinearForm::Tensor,
                    512.. if in_blocks && bias.is_none() => LinearForm::Fp8Blas,
                    _ => LinearForm::Fp8,
                };
                assert_eq!(
                    LinearForm::choose(&call, &ex.machine()),
                    Some(form),
                    "{scheme} {m} x {parts:?} x {k}"
                );
                let rows = x.view().to_f32_vec().unwrap();
                let rows = if m < 48 { rows } else { quantised_to_fp8(&rows) };
                let mut want = product(&rows, &floats, k);
                if let Some(bias) = bias {
                    let bias = bias.view().to_f32_vec().unwrap();
                    want.iter_mut().enumerate().for_each(|(i, x)| *x += f64::from(bias[i % n]));
                }
                let x = p.put(&x);
                let bias = p.put_some(bias);
                for (dtype, bound) in [(DType::F32, 4e-3), (DType::BF16, 6e-3)] {
                    let mut out = ex.zeros(dtype, &[m, n]).unwrap();
                    let guard = weight.read().unwrap();
                    linear_into(x.view(), guard.view().unwrap(), view_of(&bias), out.view_mut(), &mut ex)
                        .unwrap();
                    let got = ex.to_host(out.view()).unwrap().view().to_f32_vec().unwrap();
                    for (row, (want, got)) in want.chunks(n).zip(got.chunks(n)).enumerate() {
                        let off = relative_error(want, got);
                        assert!(
                            off < bound,
                            "{scheme} {m} x {parts:?} x {k}, {form:?}: row {row} is off by {off}"
                        );
                    }
                }
            }
        }
    }
}

/// A product that adds gives the result of a product followed by an addition, up to the order of f32 sums. The rows
/// that cuBLASLt leaves over are computed by blocks that share the columns of a row; each of these blocks adds its part
/// to the existing value.
#[test]
fn products_that_add_are_product_and_addition() {
    let mut rng = Rng::new();
    let schemes = [fp8(BLOCK), int(4, 128, true, false)];
    for (m, n, k) in
        small([(70, 128, 256), (512, 256, 384), (515, 256, 128), (1030, 384, 256)], 0, |size| size.0)
    {
        for scheme in schemes {
            let matrix = Matrix::new(&mut rng, n, k, scheme, 1);
            let source = Source { matrices: [("w".to_string(), matrix)].into(), inputs: None };
            let weight = source.weight(&[&["w".to_string()]], QuantUse::Linear, DType::BF16, &cuda());
            let p = Place::new(cuda());
            let mut ex = cuda().with_fp8_activations(Fp8Activations::Auto);
            let guard = weight.read().unwrap();
            let x = p.put(&rng.floats(DType::BF16, &[m, k]));
            let start = rng.floats(DType::F32, &[m, n]);
            let mut want = p.put(&start);
            let mut got = p.put(&start);
            let mut delta = p.out(DType::F32, &[m, n]);
            linear_into(x.view(), guard.view().unwrap(), None, delta.view_mut(), &mut ex).unwrap();
            add_into(delta.view(), want.view_mut(), &mut ex).unwrap();
            linear_add_into(x.view(), guard.view().unwrap(), None, got.view_mut(), &mut ex).unwrap();
            let what = format!("{scheme} {m} x {n} x {k}");
            assert_close(&what, &want.host(&p), &got.host(&p), sum_bound(k));
        }
    }
}

/// The norm after the experts, made for a product in FP8, has the bits of the norm in bf16 that is quantised
/// afterwards.
#[test]
fn norms_for_a_product_in_fp8_are_those_of_bf16() {
    let mut rng = Rng::new();
    let experts = 8;
    let top_k = 2;
    let hidden = 256;
    let inter = 128;
    let n = 256;
    let packs = Packs::new(&mut rng, experts, [hidden, inter], Some(fp8(BLOCK)));
    let [w13, w2] = packs.weights.each_ref().map(|weight| weight.read().unwrap());
    let matrix = Matrix::new(&mut rng, n, hidden, fp8(BLOCK), 1);
    let next = Source { matrices: [("qkv".to_string(), matrix)].into(), inputs: None };
    let next = next.weight(&[&["qkv".to_string()]], QuantUse::Linear, DType::BF16, &cuda());
    let next = next.read().unwrap();
    let p = Place::new(cuda());
    let mut ex = on();
    for (tokens, in_fp8) in
        [(9, false), (47, false), (64, true), (70, true), (131, true), (512, true), (515, false)]
    {
        let x = p.put(&rng.floats(DType::BF16, &[tokens, hidden]));
        let [weight, gain] =
            [&[experts, hidden][..], &[hidden]].map(|dims| p.put(&rng.floats(DType::BF16, dims)));
        let gate = gate(weight.view(), top_k);
        let args = MonolithicExperts {
            gate: &gate,
            w13: w13.view().unwrap(),
            w2: w2.view().unwrap(),
            expert_map: None,
            epilogue: ExpertEpilogue::PLAIN,
        };
        let start = rng.floats(DType::F32, &[tokens, hidden]);
        let form = if tokens < 256 { MonolithicForm::Tensor } else { MonolithicForm::Fp8 };
        let made = ProductRows::of_product(tokens, next.view().unwrap(), false, &ex).unwrap();
        assert_eq!(matches!(made, ProductRows::Fp8(_)), in_fp8, "{tokens} rows");
        let floats = ProductRows::Floats(ex.scratch(DType::BF16, &[tokens, hidden]).unwrap());
        let [want, got] = [floats, made].map(|mut rows| {
            let mut residual = p.put(&start);
            let mut out = p.out(DType::F32, &[tokens, n]);
            let norm = PreNorm { weight: gain.view(), eps: 1e-6 };
            let io = SublayerIo::AddNorm {
                x: x.view(),
                residual: residual.view_mut(),
                norm,
                out: rows.rows_mut(),
            };
            monolithic_experts_into(form, &args, io, &mut ex).unwrap();
            linear_into(rows.rows(), next.view().unwrap(), None, out.view_mut(), &mut ex).unwrap();
            [residual.host(&p), out.host(&p)]
        });
        assert_same(&format!("stream of {tokens} rows"), &want[0], &got[0]);
        assert_same(&format!("product of {tokens} rows"), &want[1], &got[1]);
        if let Ok(other) = ProductRows::of_product(tokens + 1, next.view().unwrap(), false, &ex) {
            let mut out = p.out(DType::F32, &[tokens, n]);
            let error = linear_into(other.rows(), next.view().unwrap(), None, out.view_mut(), &mut ex);
            assert!(error.is_err(), "{tokens} rows of out for one more");
        }
    }
}
