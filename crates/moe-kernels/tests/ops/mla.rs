//! The row ops of latent attention against their definitions, and attention whose values are
//! another size than its keys, or part of them.

use candle_core::{DType, Result};
use half::bf16;
use moe_kernels::{
    Activation, AttentionMeta, Buffer, CpuIsa, Exec, Float, MlaLatent, MlaPrompt, MlaQuery, View,
    gated_activation_into, mla_cache_into, mla_latent_into, mla_prompt_into, mla_query_into, mla_value_into,
    paged_attention_into, rms_norm_into,
};

use crate::common::{bits, data, exec, filled, isas, product, values, view, wide};

const T: usize = 5;
const R: usize = 6;

/// Cosines and sines of arbitrary angles, [T, R/2] each.
fn angles() -> (Vec<f32>, Vec<f32>) {
    let angles: Vec<f32> = data::<f32>(T * R / 2, 77).iter().map(|a| a * 3.0).collect();
    (angles.iter().map(|a| a.cos()).collect(), angles.iter().map(|a| a.sin()).collect())
}

/// The interleaved rotation in f64, as the product of complex numbers x0 + i x1.
fn rotated(x: &[f32], row: usize) -> Vec<f64> {
    let (cos, sin) = angles();
    let pair = |(i, x): (usize, &[f32])| {
        let c = cos[row * R / 2 + i] as f64;
        let s = sin[row * R / 2 + i] as f64;
        let a = x[0] as f64;
        let b = x[1] as f64;
        [a * c - b * s, a * s + b * c]
    };
    x.chunks(2).enumerate().flat_map(pair).collect()
}

fn close(got: f64, want: f64, dtype: DType) {
    let relative = if dtype == DType::F32 { 3e-7 } else { f64::powi(2.0, -8) };
    assert!((got - want).abs() <= relative * want.abs().max(0.1), "{got} {want}");
}

#[test]
fn latents_are_normed_and_their_tails_rotated() -> Result<()> {
    let l = 21;
    let compressed = data::<f32>(T * (l + R), 3);
    let (cos, sin) = angles();
    let norm = data::<bf16>(l, 4);
    for isa in isas() {
        for threads in [1, 3] {
            let ex = &mut exec(isa, threads);
            let args = MlaLatent {
                compressed: view(&compressed, &[T, l + R]),
                norm: view(&norm, &[l]),
                eps: 1e-6,
                cos: view(&cos, &[T, R / 2]),
                sin: view(&sin, &[T, R / 2]),
            };
            let mut latent = filled::<bf16>(&[T, l])?;
            let mut tail = filled::<bf16>(&[T, R])?;
            mla_latent_into(&args, latent.view_mut(), tail.view_mut(), ex)?;
            for t in 0..T {
                let (x, rest) = compressed[t * (l + R)..][..l + R].split_at(l);
                let mut want = filled::<bf16>(&[1, l])?;
                rms_norm_into(view(x, &[1, l]), view(&norm, &[l]), 1e-6, want.view_mut(), ex)?;
                assert_eq!(bits(&values::<bf16>(&latent)[t * l..][..l]), bits(&values::<bf16>(&want)));
                for (got, want) in wide(&values::<bf16>(&tail)[t * R..][..R]).iter().zip(rotated(rest, t)) {
                    close(*got, want, DType::BF16);
                }
            }
        }
    }
    Ok(())
}

fn query<T2: Float>(isa: CpuIsa, q: &[f32], dims: [usize; 3], w: Option<(&[T2], usize)>) -> Result<Vec<f32>> {
    let (cos, sin) = angles();
    let [heads, n, out] = dims;
    let args = MlaQuery {
        q: view(q, &[T, heads, n + R]),
        w_uk: w.map(|(w, l)| view(w, &[heads, l, n])),
        cos: view(&cos, &[T, R / 2]),
        sin: view(&sin, &[T, R / 2]),
    };
    let mut buffer = filled::<f32>(&[T, heads, out])?;
    mla_query_into(&args, buffer.view_mut(), &mut exec(isa, 3))?;
    Ok(values(&buffer))
}

#[test]
fn queries_stay_or_move_to_latent_space() -> Result<()> {
    let heads = 3;
    let n = 10;
    let l = 37;
    let q = data::<f32>(T * heads * (n + R), 5);
    let w = data::<bf16>(heads * l * n, 6);
    for isa in isas() {
        let naive = query::<f32>(isa, &q, [heads, n, n + R], None)?;
        let absorbed = query(isa, &q, [heads, n, l + R], Some((&w, l)))?;
        for row in 0..T * heads {
            let head = row % heads;
            let from = &q[row * (n + R)..][..n + R];
            assert_eq!(naive[row * (n + R)..][..n], from[..n]);
            for (i, want) in rotated(&from[n..], row / heads).into_iter().enumerate() {
                close(naive[row * (n + R) + n + i] as f64, want, DType::F32);
                assert_eq!(naive[row * (n + R) + n + i], absorbed[row * (l + R) + l + i]);
            }
            let rounded: Vec<bf16> = from[..n].iter().map(|x| bf16::narrow(*x)).collect();
            for column in 0..l {
                let w = &w[(head * l + column) * n..][..n];
                let want = product(isa, &rounded, w, 1);
                assert_eq!(absorbed[row * (l + R) + column].to_bits(), want.to_bits(), "{isa:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn values_leave_latent_space_head_by_head() -> Result<()> {
    let heads = 3;
    let l = 45;
    let v = 33;
    let x = data::<bf16>(T * heads * l, 1);
    let w = data::<bf16>(heads * v * l, 2);
    for isa in isas() {
        let mut out = filled::<bf16>(&[T, heads * v])?;
        let ex = &mut exec(isa, 2);
        mla_value_into(view(&x, &[T, heads * l]), view(&w, &[heads, v, l]), out.view_mut(), ex)?;
        for (i, got) in values::<bf16>(&out).iter().enumerate() {
            let row = i / (heads * v);
            let head = i / v % heads;
            let column = i % v;
            let x = &x[(row * heads + head) * l..][..l];
            let want = bf16::narrow(product(isa, x, &w[(head * v + column) * l..][..l], 1));
            assert_eq!(got.to_bits(), want.to_bits(), "{isa:?} {i}");
        }
    }
    Ok(())
}

#[test]
fn rows_go_to_their_slots_and_nowhere_else() -> Result<()> {
    let heads = 2;
    let n = 4;
    let v = 3;
    let blocks = 3;
    let size = 2;
    let kv = data::<f32>(T * heads * (n + v), 8);
    let tails = data::<bf16>(T * R, 9);
    // The second row is padding, and the last two share a slot.
    let slots = [5u32, u32::MAX, 0, 3, 3];
    let mut k = filled::<bf16>(&[blocks, heads, size, n + R])?;
    let mut values_cache = filled::<bf16>(&[blocks, heads, size, v])?;
    let rows = view(&kv, &[T, heads, n + v]);
    let tail = view(&tails, &[T, R]);
    let mapping = view(&slots, &[T]);
    mla_cache_into(rows, tail, mapping, k.view_mut(), Some(values_cache.view_mut()), &mut Exec::cpu())?;
    let k = values::<bf16>(&k);
    let values_cache = values::<bf16>(&values_cache);
    for slot in 0..blocks * size {
        let row = slots.iter().rposition(|s| *s == slot as u32);
        for head in 0..heads {
            let place = (slot / size * heads + head) * size + slot % size;
            let key = &k[place * (n + R)..][..n + R];
            let value = &values_cache[place * v..][..v];
            let Some(t) = row else {
                assert!(key.iter().chain(value).all(|x| x.widen() == 77.0), "slot {slot} is untouched");
                continue;
            };
            let from: Vec<bf16> =
                kv[(t * heads + head) * (n + v)..][..n + v].iter().map(|x| bf16::narrow(*x)).collect();
            assert_eq!((bits(&key[..n]), bits(value)), (bits(&from[..n]), bits(&from[n..])));
            assert_eq!(bits(&key[n..]), bits(&tails[t * R..][..R]));
        }
    }
    Ok(())
}

/// Attention over one sequence with everything in one call.
fn attend<K: Float>(
    isa: CpuIsa,
    q: View,
    k: (&[K], usize),
    v: (&[K], usize),
    value_dim: usize,
) -> Result<Vec<K>> {
    let len = q.dims()[0];
    let heads = q.dims()[1];
    let size = 7;
    let blocks = len.div_ceil(size);
    let cache = |x: &[K], d: usize| {
        let mut cache = x.to_vec();
        cache.resize(blocks * size * d, K::narrow(f32::NAN));
        cache
    };
    let keys = cache(k.0, k.1);
    let vals = cache(v.0, v.1);
    let (positions, table): (Vec<u32>, Vec<u32>) = ((0..len as u32).collect(), (0..blocks as u32).collect());
    let bounds = [0, len as u32];
    let meta = AttentionMeta {
        query_start_loc: view(&bounds, &[2]),
        positions: view(&positions, &[len]),
        block_tables: view(&table, &[1, blocks]),
        scale: 0.4,
        sliding_window: None,
        sinks: None,
        gates: None,
    };
    let mut out = filled::<K>(&[len, heads * value_dim])?;
    let keys = view(&keys, &[blocks, 1, size, k.1]);
    let vals = view(&vals, &[blocks, 1, size, v.1]);
    paged_attention_into(q, keys, vals, &meta, out.view_mut(), &mut exec(isa, 2))?;
    Ok(values(&out))
}

#[test]
fn values_may_be_shorter_than_keys_or_their_first_part() -> Result<()> {
    let len = 90;
    let heads = 3;
    let d = 27;
    let value_dim = 20;
    let q = data::<f32>(len * heads * d, 1);
    let k = data::<bf16>(len * d, 2);
    let v: Vec<bf16> = k.chunks(d).flat_map(|row| row[..value_dim].to_vec()).collect();
    let q = view(&q, &[len, heads, d]);
    for isa in isas() {
        let full = attend(isa, q, (&k, d), (&k, d), d)?;
        let prefix = attend(isa, q, (&k, d), (&k, d), value_dim)?;
        let own = attend(isa, q, (&k, d), (&v, value_dim), value_dim)?;
        let want: Vec<bf16> = full.chunks(d).flat_map(|row| row[..value_dim].to_vec()).collect();
        assert_eq!(bits(&prefix), bits(&want), "{isa:?}");
        assert_eq!(bits(&own), bits(&want), "{isa:?}");
    }
    let e = attend(CpuIsa::Scalar, q, (&k, d), (&v, value_dim), 21).unwrap_err().to_string();
    assert!(e.contains("v_cache with dims [13, 1, 7, at least 21]") && e.contains("[13, 1, 7, 20]"), "{e}");
    Ok(())
}

#[test]
fn wrong_shapes_dtypes_and_slots_are_named() {
    let says = |result: Result<()>, words: &str| {
        let e = result.unwrap_err().to_string();
        assert!(e.contains(words), "expected {words:?} in {e:?}");
    };
    let zeros = |dtype, dims: &[usize]| Buffer::zeros(dtype, dims).unwrap();
    let f32s = |dims: &[usize]| zeros(DType::F32, dims);
    let ex = &mut Exec::cpu();
    let cos = f32s(&[2, 2]);
    let sin = f32s(&[2, 2]);
    let latent = |x: &[usize], norm: &[usize], tail: usize, ex: &mut Exec| {
        let compressed = f32s(x);
        let norm = f32s(norm);
        let args = MlaLatent {
            compressed: compressed.view(),
            norm: norm.view(),
            eps: 1e-6,
            cos: cos.view(),
            sin: sin.view(),
        };
        mla_latent_into(&args, f32s(&[2, 8]).view_mut(), f32s(&[2, tail]).view_mut(), ex)
    };
    assert!(latent(&[2, 12], &[8], 4, ex).is_ok());
    says(latent(&[2, 11], &[8], 4, ex), "compressed with dims [2, 12], got [2, 11]");
    says(latent(&[2, 12], &[7], 4, ex), "norm with dims [8], got [7]");
    says(latent(&[2, 11], &[8], 3, ex), "even number of rotated values, got 3");
    says(latent(&[2, 14], &[8], 6, ex), "cos with dims [2, 3], got [2, 2]");

    let query = |q: &[usize], w: Option<Buffer>, out: &[usize], ex: &mut Exec| {
        let q = f32s(q);
        let w_uk = w.as_ref().map(|w| w.view());
        let args = MlaQuery { q: q.view(), w_uk, cos: cos.view(), sin: sin.view() };
        mla_query_into(&args, f32s(out).view_mut(), ex)
    };
    assert!(query(&[2, 3, 9], None, &[2, 3, 9], ex).is_ok());
    assert!(query(&[2, 3, 9], Some(f32s(&[3, 7, 5])), &[2, 3, 11], ex).is_ok());
    says(query(&[2, 3, 3], None, &[2, 3, 3], ex), "3 values per head, fewer than the 4");
    says(
        query(&[2, 3, 9], Some(f32s(&[3, 7, 6])), &[2, 3, 11], ex),
        "w_uk with dims [3, 7, 5], got [3, 7, 6]",
    );
    says(
        query(&[2, 3, 9], Some(f32s(&[3, 7, 5])), &[2, 3, 9], ex),
        "out with dims [2, 3, 11], got [2, 3, 9]",
    );
    says(query(&[2, 3, 4], Some(f32s(&[3, 7, 0])), &[2, 3, 11], ex), "a part that is not rotated");

    let mut k = f32s(&[2, 1, 2, 9]);
    let mut v = f32s(&[2, 1, 2, 3]);
    let mut cache = |kv: &[usize], slots: [u32; 2], value: bool| {
        let kv = f32s(kv);
        let tail = f32s(&[2, 4]);
        let v = value.then(|| v.view_mut());
        mla_cache_into(kv.view(), tail.view(), view(&slots, &[2]), k.view_mut(), v, &mut Exec::cpu())
    };
    assert!(cache(&[2, 1, 8], [0, 3], true).is_ok() && cache(&[2, 1, 5], [u32::MAX, 3], false).is_ok());
    says(cache(&[2, 1, 5], [0, 4], false), "slot_mapping[1] is 4; the cache holds 4 slots");
    says(cache(&[2, 1, 6], [0, 3], false), "k_cache with dims [num_blocks, 1, block_size > 0, 10]");
    says(cache(&[2, 1, 2], [0, 3], true), "2 values per head, fewer than the 3");

    let value = |x: usize, dtype, ex: &mut Exec| {
        let x = zeros(dtype, &[2, x]);
        let w = f32s(&[3, 2, 4]);
        mla_value_into(x.view(), w.view(), zeros(dtype, &[2, 6]).view_mut(), ex)
    };
    assert!(value(12, DType::F32, ex).is_ok());
    says(value(11, DType::F32, ex), "x with dims [2, 12], got [2, 11]");
    says(value(12, DType::BF16, ex), "w_uv of dtype bf16, got f32");
    let up = f32s(&[2, 4]);
    let act = |out: Buffer, ex: &mut Exec| {
        let mut out = out;
        gated_activation_into(up.view(), up.view(), Activation::SwiGlu, out.view_mut(), ex)
    };
    says(act(f32s(&[2, 3]), ex), "out with dims [2, 4], got [2, 3]");
    says(act(zeros(DType::U32, &[2, 4]), ex), "gated_activation");
}

/// In latent space a prompt has the results that keys and values of every head give.
#[test]
fn prompts_agree_with_keys_and_values_of_every_head() -> Result<()> {
    let heads = 3;
    let l = 21;
    let n = 8;
    let v = 5;
    let size = 4;
    let q = data::<f32>(T * heads * (n + R), 11);
    let w_uk = data::<f32>(heads * l * n, 12);
    let w_uv = data::<f32>(heads * v * l, 13);
    let cache = data::<f32>(3 * size * (l + R), 14);
    let starts = [0u32, 3, 5];
    let positions = [4u32, 5, 6, 0, 1];
    let tables = [2u32, 0, 1, u32::MAX];
    let args = MlaPrompt {
        q: view(&q, &[T, heads, n + R]),
        w_uk: view(&w_uk, &[heads, l, n]),
        w_uv: view(&w_uv, &[heads, v, l]),
        cache: view(&cache, &[3, 1, size, l + R]),
        meta: AttentionMeta {
            query_start_loc: view(&starts, &[3]),
            positions: view(&positions, &[T]),
            block_tables: view(&tables, &[2, 2]),
            scale: 0.3,
            sliding_window: None,
            sinks: None,
            gates: None,
        },
        positions: 9,
    };
    let row = |sequence: usize, position: usize| {
        let block = tables[2 * sequence + position / size] as usize;
        &cache[(block * size + position % size) * (l + R)..][..l + R]
    };
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let mut out = filled::<f32>(&[T, heads * v])?;
    mla_prompt_into(&args, out.view_mut(), &mut Exec::cpu())?;
    for (t, got) in values::<f32>(&out).chunks(heads * v).enumerate() {
        let sequence = usize::from(t >= 3);
        for head in 0..heads {
            let (query, tail) = q[(t * heads + head) * (n + R)..][..n + R].split_at(n);
            let scores: Vec<f64> = (0..=positions[t] as usize)
                .map(|position| {
                    let (latent, rotated) = row(sequence, position).split_at(l);
                    let key = |i: usize| -> f64 {
                        (0..l).map(|j| f64::from(w_uk[(head * l + j) * n + i]) * f64::from(latent[j])).sum()
                    };
                    let plain: f64 = (0..n).map(|i| f64::from(query[i]) * key(i)).sum();
                    0.3 * (plain + dot(tail, rotated))
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..v {
                let w = &w_uv[(head * v + i) * l..][..l];
                let value = |position| dot(w, &row(sequence, position)[..l]);
                let want: f64 = weights.iter().enumerate().map(|(p, weight)| weight / sum * value(p)).sum();
                let got = f64::from(got[head * v + i]);
                assert!((got - want).abs() < 2e-5, "{t} {head} {i}: {got} {want}");
            }
        }
    }
    Ok(())
}
