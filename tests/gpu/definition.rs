//! Products and expert layers by their definition in f64, and the distance of results from it.

use moe_kernels::Activation;
use moe_kernels::half::bf16;
use rayon::prelude::*;

/// x [M, K] · wᵀ [N, K].
pub fn product(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    let m = x.len() / k;
    let n = w.len() / k;
    (0..m * n).into_par_iter().map(|i| dot(&x[i / n * k..][..k], &w[i % n * k..][..k])).collect()
}

fn dot(x: &[f32], w: &[f32]) -> f64 {
    let mut sums = [0.0; 8];
    for (x, w) in x.chunks(8).zip(w.chunks(8)) {
        for (sum, (x, w)) in sums.iter_mut().zip(x.iter().zip(w)) {
            *sum += f64::from(*x) * f64::from(*w);
        }
    }
    sums.iter().sum()
}

/// How a product changes its rows of bf16 before it multiplies them.
pub type Operand = fn(&[f32]) -> Vec<f32>;

/// Experts in floats.
#[derive(Debug)]
pub struct Experts {
    pub hidden: usize,
    /// For each expert: the gate and up rows [2I, H], and down [H, I].
    pub weights: Vec<[Vec<f32>; 2]>,
    pub epilogue: Epilogue,
}

/// What experts compute in addition to their products.
#[derive(Debug)]
pub struct Epilogue {
    /// For each expert: the biases of gate and up [2I] and of down [H]. Those that are missing are empty.
    pub biases: Vec<[Vec<f32>; 2]>,
    pub activation: Activation,
}

impl Epilogue {
    /// SwiGLU without biases.
    pub const PLAIN: Self = Self { biases: Vec::new(), activation: Activation::SwiGlu };

    /// Adds the biases of an expert's product.
    fn add(&self, expert: usize, product: usize, sums: &mut [f64]) {
        if let Some(biases) = self.biases.get(expert) {
            sums.iter_mut().zip(&biases[product]).for_each(|(sum, bias)| *sum += f64::from(*bias));
        }
    }

    fn activate(&self, gate: f64, up: f64) -> f64 {
        match self.activation {
            Activation::SwiGlu => gate / (1.0 + (-gate).exp()) * up,
            Activation::SwiGluOai { alpha, limit } => {
                let [alpha, limit] = [alpha, limit].map(f64::from);
                let gate = gate.min(limit);
                gate / (1.0 + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1.0)
            }
            other => panic!("{other:?} has no definition here"),
        }
    }
}

impl Experts {
    /// The weighted sums [T, H] of the experts in `ids` [T, K]. Ids that do not exist add nothing. Activations are
    /// rounded to bf16.
    pub fn sums(&self, x: &[f32], ids: &[u32], weights: &[f32], operand: Operand) -> Vec<f64> {
        let hidden = self.hidden;
        let x = operand(x);
        let top_k = (ids.len() * hidden).checked_div(x.len()).unwrap_or(1).max(1);
        let slot = |(slot, id): (usize, &u32)| {
            let expert = *id as usize;
            let [gate_up, down] = self.weights.get(expert)?;
            let mut both = product(&x[slot / top_k * hidden..][..hidden], gate_up, hidden);
            self.epilogue.add(expert, 0, &mut both);
            let (gate, up) = both.split_at(both.len() / 2);
            let act =
                gate.iter().zip(up).map(|(g, u)| bf16::from_f64(self.epilogue.activate(*g, *u)).to_f32());
            let mut row = product(&operand(&act.collect::<Vec<_>>()), down, gate.len());
            self.epilogue.add(expert, 1, &mut row);
            Some(row)
        };
        let rows: Vec<Option<Vec<f64>>> = ids.par_iter().enumerate().map(slot).collect();
        let mut out = vec![0.0; x.len()];
        for (slot, row) in rows.iter().enumerate().filter_map(|(slot, row)| Some((slot, row.as_ref()?))) {
            let weight = f64::from(weights[slot]);
            out[slot / top_k * hidden..][..hidden].iter_mut().zip(row).for_each(|(o, r)| *o += weight * r);
        }
        out
    }
}

/// |got - want| / |want| of all values together; infinite if a result is not finite.
pub fn relative_error(want: &[f64], got: &[f32]) -> f64 {
    assert_eq!(want.len(), got.len());
    if got.iter().any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let off: f64 = want.iter().zip(got).map(|(w, g)| (w - f64::from(*g)).powi(2)).sum();
    (off / want.iter().map(|w| w * w).sum::<f64>().max(1e-30)).sqrt()
}
