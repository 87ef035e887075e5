//! Grouped expert products.

use candle_core::Result;
use half::{bf16, f16};
use moe_kernels::{
    Activation, CpuIsa, ExpertGroups, Float, gated_activation_into, grouped_down_into, grouped_gate_up_into,
    linear_into, row_parallel_segments,
};
use proptest::prelude::*;

use crate::common::{bits, data, exact, exec, filled, isas, product, rounding, values, view, wide};

const ACTIVATIONS: [Activation; 6] = [
    Activation::SwiGlu,
    Activation::ClampedSwiGlu { limit: 0.75 },
    Activation::Relu,
    Activation::SwiGluOai { alpha: 1.702, limit: 0.75 },
    Activation::Gelu,
    Activation::GeluTanh,
];

/// The activation by its definition, in f64.
fn activate(activation: Activation, g: f64, u: f64) -> f64 {
    match activation {
        Activation::SwiGlu => g / (1.0 + (-g).exp()) * u,
        Activation::Relu => g.max(0.0) * u,
        Activation::ClampedSwiGlu { limit } => {
            let limit = limit as f64;
            let g = g.min(limit);
            g / (1.0 + (-g).exp()) * u.clamp(-limit, limit)
        }
        Activation::SwiGluOai { alpha, limit } => {
            let g = g.min(limit as f64);
            let limit = limit as f64;
            g / (1.0 + (-(alpha as f64) * g).exp()) * (u.clamp(-limit, limit) + 1.0)
        }
        Activation::Gelu => 0.5 * g * (1.0 + candle_core::cpu::erf::erf_f64(g / 2f64.sqrt())) * u,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
            0.5 * g * (1.0 + inner.tanh()) * u
        }
        other => panic!("no definition of {other:?} here"),
    }
}

/// A way to share slots among experts.
#[derive(Clone, Debug)]
struct Groups {
    /// Rows of each expert.
    counts: Vec<usize>,
    /// Slots after the last group.
    spare: usize,
}

impl Groups {
    fn slots(&self) -> usize {
        self.counts.iter().sum::<usize>() + self.spare
    }

    fn offsets(&self) -> Vec<u32> {
        let mut offsets = vec![0];
        offsets.extend(self.counts.iter().scan(0, |at, n| {
            *at += *n as u32;
            Some(*at)
        }));
        offsets
    }

    fn expert(&self, slot: usize) -> Option<usize> {
        (0..self.counts.len()).find(|e| slot < self.counts[..=*e].iter().sum())
    }
}

fn groups() -> impl Strategy<Value = Groups> {
    let counts = prop_oneof![
        proptest::collection::vec(0usize..6, 1..6),
        proptest::collection::vec(0usize..30, 1..4),
        // All rows on one expert.
        (1usize..5, 0usize..5, 0usize..60)
            .prop_map(|(n, e, rows)| { (0..n).map(|i| if i == e % n { rows } else { 0 }).collect() }),
    ];
    (counts, 0usize..3).prop_map(|(counts, spare)| Groups { counts, spare })
}

struct Case {
    groups: Groups,
    h: usize,
    i: usize,
    bias: bool,
    threads: usize,
    seed: u64,
}

/// Gate and up: each slot against the definition, and against itself alone.
fn gate_up<T: Float>(c: &Case, activation: Activation) -> Result<()> {
    let p = c.groups.slots();
    let e = c.groups.counts.len();
    let rows = 7;
    let x = data::<T>(rows * c.h, c.seed);
    let w13 = data::<T>(e * 2 * c.i * c.h, c.seed ^ 1);
    let bias = c.bias.then(|| data::<T>(e * 2 * c.i, c.seed ^ 2));
    let offsets = c.groups.offsets();
    let used = offsets[e] as usize;
    // Entries after the last group are never followed.
    let in_rows: Vec<u32> = (0..p).map(|s| if s < used { (s * 5 % rows) as u32 } else { u32::MAX }).collect();
    for isa in isas() {
        let run = |offsets: &[u32], in_rows: &[u32]| -> Result<Vec<T>> {
            let n = in_rows.len();
            let groups = ExpertGroups {
                offsets: view(offsets, &[e + 1]),
                in_rows: view(in_rows, &[n]),
                out_rows: view(in_rows, &[n]),
            };
            let mut out = filled::<T>(&[n, c.i])?;
            let bias = bias.as_ref().map(|b| view(b, &[e, 2 * c.i]));
            let x = view(&x, &[rows, c.h]);
            let w13 = view(&w13, &[e, 2 * c.i, c.h]);
            let ex = &mut exec(isa, c.threads);
            grouped_gate_up_into(x, &groups, w13, bias, activation, out.view_mut(), ex)?;
            Ok(values(&out))
        };
        let got = run(&offsets, &in_rows)?;
        for slot in 0..p {
            let row = &got[slot * c.i..(slot + 1) * c.i];
            let Some(expert) = c.groups.expert(slot) else {
                assert!(row.iter().all(|v| v.widen() == 77.0), "slot {slot} is in no group");
                continue;
            };
            let alone: Vec<u32> = (0..=e).map(|i| u32::from(i > expert)).collect();
            assert_eq!(bits(row), bits(&run(&alone, &in_rows[slot..slot + 1])?), "{isa:?} slot {slot}");
            for (n, got) in row.iter().enumerate() {
                let x = &x[in_rows[slot] as usize * c.h..][..c.h];
                let sum = |n: usize| {
                    let (sum, abs) = exact(x, &w13[(expert * 2 * c.i + n) * c.h..][..c.h]);
                    (sum + bias.as_ref().map_or(0.0, |b| b[expert * 2 * c.i + n].widen() as f64), abs)
                };
                let (g, g_abs) = sum(n);
                let (u, u_abs) = sum(c.i + n);
                let want = activate(activation, g, u);
                // The slope of every activation in g and u is below 2 (1 + |g|) (1 + |u|).
                let slope = 2.0 * (1.0 + g.abs()) * (1.0 + u.abs());
                let tolerance = want.abs() * rounding::<T>() * 1.01 + slope * (2e-6 + 1e-5 * (g_abs + u_abs));
                let error = (got.widen() as f64 - want).abs();
                assert!(error <= tolerance, "{isa:?} slot {slot}: {} {want} ({error})", got.widen());
            }
        }
    }
    Ok(())
}

/// Down: bit for bit in the defined order, at the row that the slot names.
fn down<T: Float>(c: &Case) -> Result<()> {
    let p = c.groups.slots();
    let e = c.groups.counts.len();
    let x = data::<T>(p * c.i, c.seed);
    let w2 = data::<T>(e * c.h * c.i, c.seed ^ 1);
    let bias = c.bias.then(|| data::<T>(e * c.h, c.seed ^ 2));
    let offsets = c.groups.offsets();
    // A permutation of p of the p + 2 rows, so that some rows of out are named by no slot.
    let out_rows: Vec<u32> = (0..p).map(|s| ((s * 7 + 3) % (p + 2)) as u32).collect();
    if (p + 2).is_multiple_of(7) {
        return Ok(()); // 7 and p + 2 must be coprime for a permutation.
    }
    for isa in isas() {
        let groups = ExpertGroups {
            offsets: view(&offsets, &[e + 1]),
            in_rows: view(&out_rows, &[p]),
            out_rows: view(&out_rows, &[p]),
        };
        let mut out = filled::<f32>(&[p + 2, c.h])?;
        let bias_view = bias.as_ref().map(|b| view(b, &[e, c.h]));
        let x_view = view(&x, &[p, c.i]);
        let w2_view = view(&w2, &[e, c.h, c.i]);
        grouped_down_into(x_view, &groups, w2_view, bias_view, out.view_mut(), &mut exec(isa, c.threads))?;
        let got = values::<f32>(&out);
        let mut want = vec![77f32; (p + 2) * c.h];
        for slot in 0..p {
            let Some(expert) = c.groups.expert(slot) else { continue };
            for n in 0..c.h {
                let x = &x[slot * c.i..][..c.i];
                let w = &w2[(expert * c.h + n) * c.i..][..c.i];
                let sum = product(isa, x, w, row_parallel_segments(c.i));
                want[out_rows[slot] as usize * c.h + n] =
                    bias.as_ref().map_or(sum, |b| sum + b[expert * c.h + n].widen());
            }
        }
        assert_eq!(bits(&got), bits(&want), "{isa:?}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn grouped_products_match_their_definitions(
        groups in groups(),
        h in proptest::sample::select(&[1usize, 3, 16, 17, 33, 64, 300][..]),
        i in proptest::sample::select(&[1usize, 2, 7, 16, 24, 33, 128][..]),
        bias: bool, threads in 1usize..4, seed: u64, activation in 0usize..4,
    ) {
        let c = Case { groups, h, i, bias, threads, seed };
        let activation = ACTIVATIONS[activation];
        match seed % 3 {
            0 => gate_up::<f32>(&c, activation).and_then(|()| down::<f32>(&c)),
            1 => gate_up::<bf16>(&c, activation).and_then(|()| down::<bf16>(&c)),
            _ => gate_up::<f16>(&c, activation).and_then(|()| down::<f16>(&c)),
        }.unwrap();
    }
}

/// A group of hundreds of rows takes the tiled path and is cut into pieces.
#[test]
fn an_overloaded_expert_matches_the_dense_product() -> Result<()> {
    let p = 700usize;
    let h = 40;
    let i = 48;
    let x = data::<bf16>(p * i, 1);
    let w2 = data::<bf16>(2 * h * i, 2);
    let rows: Vec<u32> = (0..p as u32).collect();
    for isa in isas() {
        let ex = &mut exec(isa, 2);
        let groups = ExpertGroups {
            offsets: view(&[0u32, 5, 700], &[3]),
            in_rows: view(&rows, &[p]),
            out_rows: view(&rows, &[p]),
        };
        let mut out = filled::<f32>(&[p, h])?;
        let w = view(&w2, &[2, h, i]);
        grouped_down_into(view(&x, &[p, i]), &groups, w, None, out.view_mut(), ex)?;
        for slot in [0, 4, 5, 244, 699] {
            let mut one = filled::<f32>(&[1, h])?;
            let w = w.narrow(usize::from(slot >= 5), 1)?.reshape(&[h, i])?;
            moe_kernels::linear_row_parallel_into(
                view(&x[slot * i..][..i], &[1, i]),
                w,
                None,
                one.view_mut(),
                ex,
            )?;
            assert_eq!(bits(&values::<f32>(&one)), bits(&values::<f32>(&out)[slot * h..][..h]));
        }
    }
    Ok(())
}

/// The first half of w13 is the gate. With zero gate rows and a gate bias of 100, where silu is the
/// identity, out is 100 times the up product.
#[test]
fn gate_and_up_rows_are_not_confused() -> Result<()> {
    let h = 8;
    let i = 20;
    let x = data::<f32>(h, 3);
    let mut w13 = vec![0f32; 2 * i * h];
    w13[i * h..].copy_from_slice(&data::<f32>(i * h, 4));
    let groups = ExpertGroups {
        offsets: view(&[0u32, 1], &[2]),
        in_rows: view(&[0u32], &[1]),
        out_rows: view(&[0u32], &[1]),
    };
    let ex = &mut exec(CpuIsa::Scalar, 1);
    let mut bias = vec![0f32; 2 * i];
    bias[..i].fill(100.0);
    let mut out = filled::<f32>(&[1, i])?;
    let mut up = filled::<f32>(&[1, i])?;
    let w = view(&w13, &[1, 2 * i, h]);
    let bias = Some(view(&bias, &[1, 2 * i]));
    grouped_gate_up_into(view(&x, &[1, h]), &groups, w, bias, Activation::SwiGlu, out.view_mut(), ex)?;
    linear_into(view(&x, &[1, h]), view(&w13[i * h..], &[i, h]), None, up.view_mut(), ex)?;
    for (out, up) in wide(&values::<f32>(&out)).iter().zip(wide(&values::<f32>(&up))) {
        assert!((out - 100.0 * up).abs() < 1e-4);
    }
    Ok(())
}

#[test]
fn the_activation_alone_is_that_of_the_grouped_product() -> Result<()> {
    let t = 4;
    let h = 19;
    let i = 37;
    let x = data::<bf16>(t * h, 1);
    let w = data::<bf16>(2 * i * h, 2);
    let rows: Vec<u32> = (0..t as u32).collect();
    let offsets = [0, t as u32];
    for isa in isas() {
        let ex = &mut exec(isa, 2);
        let groups = ExpertGroups {
            offsets: view(&offsets, &[2]),
            in_rows: view(&rows, &[t]),
            out_rows: view(&rows, &[t]),
        };
        for activation in [Activation::SwiGlu, Activation::Gelu, Activation::GeluTanh] {
            let mut want = filled::<bf16>(&[t, i])?;
            let mut got = filled::<bf16>(&[t, i])?;
            let x = view(&x, &[t, h]);
            grouped_gate_up_into(
                x,
                &groups,
                view(&w, &[1, 2 * i, h]),
                None,
                activation,
                want.view_mut(),
                ex,
            )?;
            let (gate, up) = w.split_at(i * h);
            let mut a = filled::<f32>(&[t, i])?;
            let mut b = filled::<f32>(&[t, i])?;
            linear_into(x, view(gate, &[i, h]), None, a.view_mut(), ex)?;
            linear_into(x, view(up, &[i, h]), None, b.view_mut(), ex)?;
            gated_activation_into(a.view(), b.view(), activation, got.view_mut(), ex)?;
            assert_eq!(bits(&values::<bf16>(&got)), bits(&values::<bf16>(&want)), "{isa:?} {activation:?}");
        }
    }
    Ok(())
}
