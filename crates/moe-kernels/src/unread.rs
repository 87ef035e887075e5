//! Tensors of a checkpoint that a loader knows and does not read: an error that names them, instead of a model that
//! computes something else.
//!
//! A [`VarBuilder`] cannot list its names, so each loader also asks for the names that models are known to have in
//! addition to the ones that it reads.

use candle_core::{DType, Result, bail};
use candle_nn::VarBuilder;

/// How many names an error lists.
const LISTED: usize = 8;
/// No checkpoint has a tensor of this name. A source that says so has no names of its own, as `VarBuilder::zeros`.
const NO_TENSOR: &str = "no tensor has this name";

/// What a loader finds under its prefix and does not read.
pub struct Unread<'a> {
    vb: &'a VarBuilder<'a>,
    has_names: bool,
    found: Vec<String>,
}

impl<'a> Unread<'a> {
    /// A list without findings, for names under the prefix of `vb`.
    pub fn under(vb: &'a VarBuilder<'a>) -> Self {
        Self { vb, has_names: !vb.contains_tensor(NO_TENSOR), found: Vec::new() }
    }

    /// Adds a tensor to the findings if the checkpoint has it: it would change what the module computes.
    pub fn tensor(&mut self, name: &str) {
        if self.is_there(name) {
            self.found.push(name.to_string());
        }
    }

    /// Adds a bias to the findings, unless it is zero: then it changes nothing.
    pub fn bias(&mut self, name: &str) {
        if self.is_there(name) && !self.is_zero(name).unwrap_or(false) {
            self.found.push(name.to_string());
        }
    }

    /// Adds tensors to the findings that show that a weight is quantised: its scales, with which the stored weight
    /// means something else than floats, and its packed integers.
    pub fn scales(&mut self, weight: &str) {
        for suffix in ["_scale", "_scale_inv", "_scales"] {
            self.tensor(&format!("{weight}{suffix}"));
        }
        let Some(module) = weight.strip_suffix("weight") else { return };
        for packed in ["qweight", "weight_packed"] {
            self.tensor(&format!("{module}{packed}"));
        }
    }

    /// Fails if there is any.
    ///
    /// # Errors
    /// The tensors by name; `advice` says what reads them.
    pub fn refuse(self, loader: &str, advice: &str) -> Result<()> {
        if self.found.is_empty() {
            return Ok(());
        }
        let prefix = match self.vb.prefix() {
            prefix if prefix.is_empty() => prefix,
            prefix => format!("{prefix}."),
        };
        let listed: Vec<String> =
            self.found.iter().take(LISTED).map(|name| format!("{prefix}{name}")).collect();
        let more = match self.found.len() - listed.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        bail!(
            "{loader}: the checkpoint has tensors that this configuration does not read, so that the results would be others: \
             {}{more}; {advice}",
            listed.join(", ")
        )
    }

    fn is_there(&self, name: &str) -> bool {
        self.has_names && self.vb.contains_tensor(name)
    }

    fn is_zero(&self, name: &str) -> Result<bool> {
        let values = self.vb.get_unchecked_dtype(name, DType::F32)?.flatten_all()?;
        Ok(values.to_vec1::<f32>()?.iter().all(|value| *value == 0.0))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use candle_core::{Device, Tensor};

    use super::*;

    fn refused(tensors: &[(&str, f32)]) -> Option<String> {
        let tensor = |&(name, value): &(&str, f32)| {
            let tensor = Tensor::new(&[value, 0.0], &Device::Cpu).unwrap();
            (name.to_string(), tensor.to_dtype(DType::BF16).unwrap())
        };
        let tensors: HashMap<String, Tensor> = tensors.iter().map(tensor).collect();
        let vb = VarBuilder::from_tensors(tensors, DType::BF16, &Device::Cpu).pp("gate");
        let mut unread = Unread::under(&vb);
        unread.bias("bias");
        unread.tensor("table");
        unread.scales("weight");
        unread.refuse("router", "read them").err().map(|e| e.to_string())
    }

    #[test]
    fn what_changes_results_is_named_and_zeros_are_not() {
        assert_eq!(refused(&[("gate.weight", 1.0), ("bias", 1.0)]), None);
        assert_eq!(refused(&[("gate.bias", 0.0)]), None);
        let error =
            refused(&[("gate.bias", 1.0), ("gate.table", 0.0), ("gate.weight_scale_inv", 1.0)]).unwrap();
        assert!(error.contains("gate.bias, gate.table, gate.weight_scale_inv; read them"), "{error}");
        let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
        let mut unread = Unread::under(&vb);
        unread.tensor("table");
        assert!(unread.refuse("router", "").is_ok(), "a source without names has none to refuse");
    }
}
