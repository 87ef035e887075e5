//! Norms of q and k over all heads against their definition, on one rank and on several.

use moe_kernels::candle::{DType, Result};
use moe_kernels::half::bf16;
use moe_kernels::{Buffer, Exec, HeadsNorm, QkvHeads, View, ViewMut, head_squares_into, heads_norm_into};

const EPS: f32 = 1e-5;
const ROWS: usize = 5;

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| (((i + 7) * 7919 + seed * 104_729) % 2003) as f32 / 701.0 - 1.3).collect()
}

/// A row's parts of a width each, of all rows one after the other.
fn columns(x: &[f32], width: usize, range: std::ops::Range<usize>) -> Vec<f32> {
    x.chunks(width).flat_map(|row| row[range.clone()].to_vec()).collect()
}

/// q, k and v of the heads that a rank holds, in the rows' order, and its parts of the norms' weights.
struct Rank {
    heads: QkvHeads,
    qkv: Vec<f32>,
    q_norm: Vec<bf16>,
    k_norm: Vec<bf16>,
}

/// The ranks of a layer; `whole` has the heads of all. A k head is on `replicas` ranks.
fn ranks(whole: QkvHeads, count: usize, replicas: usize) -> Vec<Rank> {
    let QkvHeads { q, kv, dim } = whole;
    let width = (q + 2 * kv) * dim;
    let x = values(ROWS * width, 1);
    let weight = |n, seed| values(n, seed).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let q_weight = weight(q * dim, 2);
    let k_weight = weight(kv * dim, 3);
    let q_part = q / count * dim;
    let kv_part = kv * replicas / count * dim;
    let rank = |rank: usize| {
        let q_start = rank * q_part;
        let kv_start = rank / replicas * kv_part;
        let mut qkv = Vec::new();
        for row in x.chunks(width) {
            qkv.extend_from_slice(&row[q_start..][..q_part]);
            qkv.extend_from_slice(&row[q * dim + kv_start..][..kv_part]);
            qkv.extend_from_slice(&row[(q + kv) * dim + kv_start..][..kv_part]);
        }
        Rank {
            heads: QkvHeads { q: q_part / dim, kv: kv_part / dim, dim },
            qkv,
            q_norm: q_weight[q_start..][..q_part].to_vec(),
            k_norm: k_weight[kv_start..][..kv_part].to_vec(),
        }
    };
    (0..count).map(rank).collect()
}

/// Each rank's rows after the norms.
fn normed(ranks: &[Rank], kv_replicas: usize, ex: &mut Exec) -> Result<Vec<Vec<f32>>> {
    let normed = ranks[0].heads.normed();
    let mut squares = Buffer::zeros(DType::F32, &[ranks.len(), ROWS, normed])?;
    for (at, rank) in ranks.iter().enumerate() {
        let qkv = View::new(&rank.qkv, &[ROWS, rank.qkv.len() / ROWS])?;
        let mut all = squares.view_mut();
        let own = all.reborrow().narrow(at, 1)?.reshape(&[ROWS, normed])?;
        head_squares_into(qkv, rank.heads, own, ex)?;
    }
    let norm = |rank: &Rank| -> Result<Vec<f32>> {
        let args = HeadsNorm {
            squares: squares.view(),
            kv_replicas,
            q_norm: View::new(&rank.q_norm, &[rank.q_norm.len()])?,
            k_norm: View::new(&rank.k_norm, &[rank.k_norm.len()])?,
            eps: EPS,
        };
        let mut qkv = rank.qkv.clone();
        let dims = [ROWS, qkv.len() / ROWS];
        heads_norm_into(&args, rank.heads, ViewMut::new(&mut qkv, &dims)?, &mut ex.clone())?;
        Ok(qkv)
    };
    ranks.iter().map(norm).collect()
}

#[test]
fn one_rank_has_the_norms_of_the_definition() -> Result<()> {
    for (q, kv, dim) in [(4, 4, 16), (6, 2, 10), (1, 1, 2), (3, 1, 70)] {
        let whole = QkvHeads { q, kv, dim };
        let rank = &ranks(whole, 1, 1)[0];
        let got = normed(std::slice::from_ref(rank), 1, &mut Exec::cpu())?.remove(0);
        for (got, row) in got.chunks((q + 2 * kv) * dim).zip(rank.qkv.chunks((q + 2 * kv) * dim)) {
            let k_start = q * dim;
            let v_start = (q + kv) * dim;
            for (range, weight) in [(0..k_start, &rank.q_norm), (k_start..v_start, &rank.k_norm)] {
                let squares: f64 = row[range.clone()].iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                let rms = (squares / range.len() as f64 + f64::from(EPS)).sqrt();
                for ((got, x), weight) in got[range.clone()].iter().zip(&row[range.clone()]).zip(weight) {
                    let want = f64::from(*x) / rms * f64::from(weight.to_f32());
                    assert!(
                        (f64::from(*got) - want).abs() < 1e-5 * (1.0 + want.abs()),
                        "{whole:?}: {got} {want}"
                    );
                }
            }
            assert_eq!(got[v_start..], row[v_start..], "values have no norm");
        }
    }
    Ok(())
}

/// Whether each rank has some of the k heads, or several have the same ones.
#[test]
fn ranks_have_the_bits_of_one() -> Result<()> {
    for (q, kv, count, replicas) in [(4, 4, 2, 1), (4, 4, 4, 1), (8, 2, 4, 2), (8, 1, 4, 4), (4, 2, 2, 1)] {
        let whole = QkvHeads { q, kv, dim: 6 };
        let mut ex = Exec::cpu();
        let one = normed(&ranks(whole, 1, 1), 1, &mut ex)?.remove(0);
        let parts = ranks(whole, count, replicas);
        for (rank, got) in normed(&parts, replicas, &mut ex)?.into_iter().enumerate() {
            let width = one.len() / ROWS;
            let own = parts[rank].heads;
            let q_width = own.q * 6;
            let kv_width = own.kv * 6;
            let k_start = q * 6 + rank / replicas * kv_width;
            let want = [
                columns(&one, width, rank * q_width..(rank + 1) * q_width),
                columns(&one, width, k_start..k_start + kv_width),
            ];
            let got_width = q_width + 2 * kv_width;
            let got =
                [columns(&got, got_width, 0..q_width), columns(&got, got_width, q_width..q_width + kv_width)];
            assert_eq!(got, want, "{q} and {kv} heads over {count} ranks, rank {rank}");
        }
    }
    Ok(())
}

#[test]
fn replicas_that_do_not_divide_the_ranks_are_refused() {
    let parts = ranks(QkvHeads { q: 4, kv: 4, dim: 6 }, 2, 1);
    for replicas in [0, 3] {
        let error = normed(&parts, replicas, &mut Exec::cpu()).unwrap_err().to_string();
        assert!(error.contains("kv_replicas that divides 2 ranks"), "{error}");
    }
}
