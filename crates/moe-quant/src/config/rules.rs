//! Which module is stored in which format: an ordered list of rules, of which the first that matches a module's name
//! counts.

use std::collections::HashMap;
use std::sync::Arc;

use moe_kernels::QuantScheme;
use safetensors::Dtype;

use super::pattern::Pattern;
use crate::error::QuantError;
use crate::format::Format;

/// How a checkpoint is quantised: the validated header.
///
/// A module's name is the name of the checkpoint's tensors without the last part:
/// `model.layers.0.mlp.experts.3.up_proj`.
#[derive(Clone, Debug)]
pub struct QuantConfig {
    pub(super) method: &'static str,
    /// The format of each module, or of all below one, where it is said module by module.
    pub(super) modules: Option<Arc<HashMap<String, Format>>>,
    /// They come before `modules`.
    pub(super) rules: Vec<Rule>,
    pub(super) otherwise: Format,
    pub(super) notes: Vec<String>,
    /// Whether loaders get floats in the place of codes.
    pub(super) dequantised: bool,
}

/// Modules and their format.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    pub pattern: Pattern,
    pub format: Format,
}

impl Rule {
    pub(super) fn plain(pattern: Pattern) -> Self {
        Self { pattern, format: Format::Plain }
    }
}

impl QuantConfig {
    /// The method whose files hold quantised experts in packs: codes and scales of all experts of a layer in one tensor
    /// each, instead of tensors for each matrix.
    pub const PACKED_EXPERTS: &'static str = "mxfp4";

    /// The types of a GGUF file's quantised matrices, by the names of their modules.
    pub fn gguf(modules: HashMap<String, Format>, notes: Vec<String>) -> Self {
        Self {
            method: "gguf",
            modules: Some(Arc::new(modules)),
            rules: Vec::new(),
            otherwise: Format::Plain,
            notes,
            dequantised: false,
        }
    }

    /// The same files, of which every quantised matrix is loaded as the floats that its codes stand for, in the dtype
    /// of the model. So the model runs where no kernel reads a format, and takes the memory of floats.
    #[must_use]
    pub fn dequantised(self) -> Self {
        Self { dequantised: true, ..self }
    }

    /// The same files, of which quantised matrices stay as they are stored.
    #[must_use]
    pub fn as_stored(self) -> Self {
        Self { dequantised: false, ..self }
    }

    /// Whether quantised matrices are loaded as floats.
    pub fn is_dequantised(&self) -> bool {
        self.dequantised
    }

    /// Whether any module is quantised in the files.
    pub fn has_quantised(&self) -> bool {
        let is_quantised = |format: &Format| *format != Format::Plain;
        let named = self.modules.iter().flat_map(|modules| modules.values());
        let mut formats = self.rules.iter().map(|rule| &rule.format).chain(named).chain([&self.otherwise]);
        formats.any(is_quantised)
    }

    /// Name of the method: `gptq`, `awq`, `compressed-tensors`, `fp8`, `auto-round`, `modelopt`, `quark`, `mxfp4` or
    /// `gguf`.
    pub fn method(&self) -> &'static str {
        self.method
    }

    /// What the header asks for and this crate leaves out without changing the weights, to be told to people: such as
    /// activations that are not quantised.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The format that the header gives a linear layer.
    ///
    /// # Errors
    /// A pattern of the header that takes too many steps on this name.
    pub fn format_of(&self, module: &str) -> Result<Format, QuantError> {
        for rule in &self.rules {
            if rule.pattern.matches(module)? {
                return Ok(rule.format);
            }
        }
        let Some(modules) = &self.modules else { return Ok(self.otherwise) };
        let mut names = std::iter::successors(Some(module), |name| Some(name.rsplit_once('.')?.0));
        let named = names.find_map(|name| modules.get(name));
        Ok(named.copied().unwrap_or(self.otherwise))
    }

    /// The scheme in which a linear layer is held in memory: that of [`format_of`](Self::format_of), or none if it is
    /// [loaded as floats](Self::dequantised).
    ///
    /// # Errors
    /// The errors of `format_of`.
    pub fn scheme_of(&self, module: &str) -> Result<QuantScheme, QuantError> {
        self.format_of(module).map(|format| self.held(format))
    }

    /// The scheme in which a matrix of this format is held in memory.
    pub fn held(&self, format: Format) -> QuantScheme {
        if self.dequantised { QuantScheme::NONE } else { format.scheme() }
    }

    /// Bytes that a weight takes in memory in a row of `k`, with its share of scales in 16 bits and of zero points;
    /// `None` for floats.
    ///
    /// # Errors
    /// The errors of `format_of`.
    pub fn bytes_per_weight(&self, module: &str, k: usize) -> Result<Option<f64>, QuantError> {
        Ok(self.scheme_of(module)?.bytes_per_weight(k))
    }

    /// The format in which a file really holds a linear layer. Some makers leave modules such as the router in floats
    /// without a word in the header, so a `weight` in a float dtype is taken as it is. Others quantise modules that the
    /// header's lists leave out; as in vLLM the names in the file decide, and the module has the format of most modules
    /// ([`is_left_out`](Self::is_left_out) tells). The scales of FP8 go by two names, which no header tells. `dtype_of`
    /// says the dtype of the tensor of this suffix (`weight`, `qweight`), if there is one.
    ///
    /// # Errors
    /// The errors of `format_of`; a module that the header calls not quantised, but the file holds in a format that the
    /// header does not tell.
    pub fn format_in_file(
        &self,
        module: &str,
        dtype_of: impl Fn(&str) -> Option<Dtype>,
    ) -> Result<Format, QuantError> {
        let weight = dtype_of("weight");
        if weight.is_some_and(|dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)) {
            return Ok(Format::Plain);
        }
        let has = |suffix: &str| dtype_of(suffix).is_some();
        let packed = ["qweight", "weight_packed"].into_iter().find(|suffix| has(suffix));
        let found = packed.or(weight.map(|_| "weight"));
        let format = match (self.format_of(module)?, found) {
            (Format::Plain, Some(suffix)) => {
                let usual = self.usual().filter(|format| format.main_tensor() == suffix);
                usual.ok_or_else(|| QuantError::matrix(module, self.contradiction(suffix)))?
            }
            (format, _) => format,
        };
        Ok(match format {
            Format::Fp8 { scales, scale_inv } => {
                let scale_inv = if scale_inv { !has("weight_scale") } else { has("weight_scale_inv") };
                Format::Fp8 { scales, scale_inv }
            }
            other => other,
        })
    }

    /// Whether the header says that a module is not quantised although the file holds it in this format.
    ///
    /// # Errors
    /// The errors of `format_of`.
    pub fn is_left_out(&self, module: &str, in_file: Format) -> Result<bool, QuantError> {
        Ok(in_file != Format::Plain && self.format_of(module)? == Format::Plain)
    }

    /// The keys of the header that leave modules out, for messages.
    pub fn leaving_out(&self) -> &'static str {
        match self.method {
            "gptq" => "modules_in_block_to_quantize, modules_to_not_convert, dynamic and lm_head",
            "awq" => "modules_to_not_convert and dynamic",
            "auto-round" => "block_name_to_quantize and extra_config",
            "fp8" => "modules_to_not_convert and ignored_layers",
            "modelopt" => "exclude_modules, ignore and quantized_layers",
            "quark" => "exclude and layer_quant_config",
            Self::PACKED_EXPERTS => "modules_to_not_convert",
            _ => "ignore and targets",
        }
    }

    /// The format of modules without settings of their own; `None` if several formats have a claim.
    fn usual(&self) -> Option<Format> {
        if self.otherwise != Format::Plain {
            return Some(self.otherwise);
        }
        let mut formats = self.rules.iter().map(|rule| rule.format).filter(|format| *format != Format::Plain);
        let first = formats.next()?;
        formats.all(|format| format == first).then_some(first)
    }

    fn contradiction(&self, suffix: &str) -> String {
        format!(
            "the header ({}) says that it is not quantised, but the file holds a quantised `{suffix}`; correct \
             quantization_config in config.json ({} leave modules out)",
            self.method,
            self.leaving_out()
        )
    }
}
