//! RoPE rows against values of transformers, and against the definition.

use candle_core::Result;
use model_runtime::config::{Config, RopeConfig};
use model_runtime::{Exec, Rope, View};
use serde_json::Value;

use crate::message;

fn rope(text: &str, dim: usize, max: usize) -> Rope {
    Rope::new(RopeConfig::from_config(&Config::parse(text, "config.json").unwrap(), dim, max).unwrap())
}

/// Cosine and sine rows of positions with their lengths.
fn rows(rope: &Rope, positions: &[u32], lens: &[u32]) -> Result<(Vec<f32>, Vec<f32>)> {
    let t = positions.len();
    let rows = rope.rows(View::new(positions, &[t])?, View::new(lens, &[lens.len()])?, &mut Exec::cpu())?;
    Ok((rows.cos().cpu::<f32>()?.to_vec(), rows.sin().cpu::<f32>()?.to_vec()))
}

/// Values of `Qwen3MoeRotaryEmbedding` of transformers 5.17 in f32, theta 10000. `cos` and `sin` are for the last token
/// of a prompt of `len` tokens.
fn references() -> Vec<Value> {
    serde_json::from_str(include_str!("../data/rope.json")).unwrap()
}

fn floats(values: &Value) -> Vec<f32> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

#[test]
fn rows_equal_transformers() -> Result<()> {
    for r in references() {
        let config = r["config"].to_string();
        let [dim, max, len] = ["dim", "max", "len"].map(|name| r[name].as_u64().unwrap() as usize);
        let rope = rope(&config, dim, max);
        let want = floats(&r["inv_freq"]);
        assert_eq!(want.len(), dim / 2);
        for (got, want) in rope.inv_freq(len as u32).iter().zip(&want) {
            // Both sides round every operation to f32; torch's vectorised pow may differ by one ulp.
            assert!((got - want).abs() <= want * f32::EPSILON, "{config}: {got} {want}");
        }
        let positions: Vec<u32> = (0..len as u32).collect();
        let (cos, sin) = rows(&rope, &positions, &vec![len as u32; len])?;
        let last = cos.len() - dim / 2;
        for (got, want) in [(&cos[last..], floats(&r["cos"])), (&sin[last..], floats(&r["sin"]))] {
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(want) {
                // An ulp of a frequency times position 299.
                assert!((got - want).abs() < 2e-5, "{config}: {got} {want}");
            }
        }
    }
    Ok(())
}

/// In transformers only the part of a head that is rotated is multiplied by the cosines and sines with their factor.
#[test]
fn yarn_scales_the_rotated_part_of_a_head_alone() -> Result<()> {
    let text = r#"{"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 16, "partial_rotary_factor": 0.25}}"#;
    let config = Config::parse(text, "config.json").unwrap();
    let part = Rope::new(RopeConfig::partial_from_config(&config, 32, 64, 1.0).unwrap());
    let whole = rope(&text.replace("0.25", "1.0"), 8, 64);
    let positions = [0, 5, 63];
    let (part, whole) = (rows(&part, &positions, &[64; 3])?, rows(&whole, &positions, &[64; 3])?);
    let factor = 0.1 * 4f32.ln() + 1.0;
    assert!((part.0[0] - factor).abs() < 1e-6, "{}", part.0[0]);
    for row in 0..3 {
        assert_eq!(part.0[row * 16..][..4], whole.0[row * 4..][..4]);
        assert_eq!(part.1[row * 16..][..4], whole.1[row * 4..][..4]);
        assert_eq!(part.0[row * 16..][4..16], [1.0; 12]);
        assert_eq!(part.1[row * 16..][4..16], [0.0; 12]);
    }
    Ok(())
}

#[test]
fn dynamic_rows_use_the_length_they_are_given() -> Result<()> {
    let text = r#"{"rope_theta": 500, "rope_scaling": {"type": "dynamic", "factor": 2.0}}"#;
    let rope = rope(text, 8, 10);
    // Up to max_position_embeddings the frequencies are the plain ones.
    assert_eq!(rope.inv_freq(10), rope.inv_freq(1));
    assert_ne!(rope.inv_freq(11), rope.inv_freq(10));
    for (position, len) in [(3u32, 10u32), (3, 25), (24, 25), (30, 31)] {
        let stretch = if len > 10 { 2.0 * len as f64 / 10.0 - 1.0 } else { 1.0 };
        let base = 500.0 * stretch.powf(8.0 / 6.0);
        let (cos, sin) = rows(&rope, &[position], &[len])?;
        for i in 0..4 {
            let angle = position as f64 / base.powf(i as f64 / 4.0);
            assert!((cos[i] as f64 - angle.cos()).abs() < 1e-5 && (sin[i] as f64 - angle.sin()).abs() < 1e-5);
        }
    }
    Ok(())
}

#[test]
fn rows_do_not_depend_on_their_number_or_on_threads() -> Result<()> {
    let rope = rope(r#"{"rope_scaling": {"type": "dynamic", "factor": 2.0}}"#, 16, 20);
    let positions: Vec<u32> = (0..100).collect();
    let lens: Vec<u32> = positions.iter().map(|p| (p + 1).max(50)).collect();
    let (cos, sin) = rows(&rope, &positions, &lens)?;
    for (i, (&p, &len)) in positions.iter().zip(&lens).enumerate() {
        let one = rows(&rope, &[p], &[len])?;
        assert_eq!((&cos[i * 8..i * 8 + 8], &sin[i * 8..i * 8 + 8]), (&one.0[..], &one.1[..]));
    }
    let mut three = Exec::cpu().with_threads(3)?;
    let again = rope.rows(View::new(&positions, &[100])?, View::new(&lens, &[100])?, &mut three)?;
    assert_eq!(again.cos().cpu::<f32>()?, cos);
    assert_eq!(rows(&rope, &[], &[])?.0, [0f32; 0]);
    Ok(())
}

#[test]
fn wrong_rows_are_refused() -> Result<()> {
    let rope = rope("{}", 16, 20);
    assert!(
        message(rows(&rope, &[0, 5], &[1, 5])).contains("row 1: position 5 needs rope_len above it, got 5")
    );
    assert!(message(rows(&rope, &[0, 5], &[1])).contains("expected rope_len with dims [2], got [1]"));
    Ok(())
}
