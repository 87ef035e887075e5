//! RoPE rows against values of transformers, and against the definition.

use candle_core::Result;
use model_runtime::config::{Config, RopeConfig};
use model_runtime::{Exec, Rope, View};

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

struct Reference {
    config: &'static str,
    dim: usize,
    max: usize,
    /// The prompt's length; `cos` and `sin` are for its last token.
    len: u32,
    inv_freq: &'static [f32],
    cos: &'static [f32],
    sin: &'static [f32],
}

/// Values of `Qwen3MoeRotaryEmbedding` of transformers 5.17 in f32, theta 10000.
const REFERENCES: &[Reference] = &[
    Reference {
        config: "{}",
        dim: 16,
        max: 64,
        len: 300,
        inv_freq: &[1.0, 0.31622776, 0.1, 0.03162278, 0.01, 0.0031622779, 0.001, 0.0003162278],
        cos: &[-0.85320437, 0.9540505, 0.05484188, -0.9995369, -0.9885318, 0.5853205, 0.95563155, 0.9955333],
        sin: &[
            -0.5215767,
            0.29964596,
            -0.99849504,
            -0.030428028,
            0.1510127,
            0.81080204,
            0.29456475,
            0.094411284,
        ],
    },
    Reference {
        config: r#"{"rope_scaling": {"type": "linear", "factor": 2.5}}"#,
        dim: 16,
        max: 64,
        len: 10,
        inv_freq: &[0.4, 0.1264911, 0.04, 0.012649111, 0.004, 0.0012649111, 0.0004, 0.00012649111],
        cos: &[-0.8967584, 0.41902974, 0.9358968, 0.993527, 0.99935204, 0.9999352, 0.9999935, 0.99999934],
        sin: &[
            -0.4425206,
            0.9079725,
            0.3522742,
            0.11359626,
            0.035992224,
            0.011383954,
            0.0035999925,
            0.0011384197,
        ],
    },
    Reference {
        config: r#"{"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}"#,
        dim: 16,
        max: 64,
        len: 100,
        inv_freq: &[
            1.0,
            0.267223,
            0.07140812,
            0.019081892,
            0.00509912,
            0.001362602,
            0.00036411858,
            9.730085e-5,
        ],
        cos: &[0.03982088, 0.24591284, 0.7065263, -0.31296286, 0.875265, 0.9909151, 0.99935037, 0.9999536],
        sin: &[
            -0.99920684,
            0.9692919,
            0.70768684,
            0.9497654,
            0.48364368,
            0.13448885,
            0.03603993,
            0.009632635,
        ],
    },
    Reference {
        config: r#"{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}"#,
        dim: 16,
        max: 256,
        len: 40,
        inv_freq: &[1.0, 0.23717082, 0.05, 0.007905695, 0.0025, 0.00079056947, 0.00025, 7.905695e-5],
        cos: &[0.3036075, -1.1212155, -0.42149872, 1.0849364, 1.1332216, 1.1380882, 1.1385753, 1.138624],
        sin: &[
            1.0974058,
            0.19837528,
            1.0577409,
            0.34552884,
            0.11084055,
            0.0351009,
            0.011101461,
            0.0035106405,
        ],
    },
    Reference {
        config: r#"{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            "mscale": 1.2, "mscale_all_dim": 0.6, "truncate": false, "beta_fast": 4.0}}"#,
        dim: 32,
        max: 256,
        len: 40,
        inv_freq: &[
            1.0,
            0.56234133,
            0.27917454,
            0.1016103,
            0.025996597,
            0.014058532,
            0.007905695,
            0.0044456986,
            0.0025,
            0.0014058533,
            0.00079056947,
            0.00044456986,
            0.00025,
            0.00014058533,
            7.905695e-5,
            4.4456985e-5,
        ],
        cos: &[
            0.28711855,
            -1.0748634,
            -0.11581842,
            -0.73365706,
            0.5691719,
            0.91895545,
            1.0260134,
            1.060646,
            1.0716764,
            1.0751724,
            1.0762787,
            1.0766286,
            1.0767393,
            1.0767742,
            1.0767853,
            1.0767889,
        ],
        sin: &[
            1.0378057,
            0.06439241,
            -1.0705436,
            -0.78817827,
            0.91406834,
            0.5612474,
            0.32676315,
            0.18576235,
            0.1048208,
            0.05900899,
            0.033194568,
            0.0186687,
            0.01049854,
            0.005903827,
            0.0033199775,
            0.0018669626,
        ],
    },
    Reference {
        config: r#"{"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0.8, "beta_fast": 2.0,
            "beta_slow": 0.25}}"#,
        dim: 32,
        max: 48,
        len: 40,
        inv_freq: &[
            1.0,
            0.56234133,
            0.31622776,
            0.14448519,
            0.0625,
            0.024602432,
            0.007905695,
            0.0044456986,
            0.0025,
            0.0014058533,
            0.00079056947,
            0.00044456986,
            0.00025,
            0.00014058533,
            7.905695e-5,
            4.4456985e-5,
        ],
        cos: &[
            0.21331434, -0.7985683, 0.7782923, 0.6377072, -0.6097594, 0.45914698, 0.7622753, 0.78800553,
            0.7962005, 0.79879785, 0.7996198, 0.7998797, 0.799962, 0.799988, 0.7999962, 0.7999988,
        ],
        sin: &[
            0.7710363,
            0.047840253,
            -0.18509762,
            -0.48304206,
            0.517874,
            0.6551214,
            0.24276824,
            0.13801189,
            0.07787647,
            0.04384065,
            0.02466186,
            0.013869885,
            0.0077998764,
            0.00438624,
            0.002466573,
            0.0013870572,
        ],
    },
];

#[test]
fn rows_equal_transformers() -> Result<()> {
    for r in REFERENCES {
        let rope = rope(r.config, r.dim, r.max);
        for (got, want) in rope.inv_freq(r.len).iter().zip(r.inv_freq) {
            // Both sides round every operation to f32; torch's vectorised pow may differ by one ulp.
            assert!((got - want).abs() <= want * f32::EPSILON, "{}: {got} {want}", r.config);
        }
        let positions: Vec<u32> = (0..r.len).collect();
        let (cos, sin) = rows(&rope, &positions, &vec![r.len; r.len as usize])?;
        let last = cos.len() - r.dim / 2;
        for (got, want) in [(&cos[last..], r.cos), (&sin[last..], r.sin)] {
            for (got, want) in got.iter().zip(want) {
                // An ulp of a frequency times position 299.
                assert!((got - want).abs() < 2e-5, "{}: {got} {want}", r.config);
            }
        }
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
