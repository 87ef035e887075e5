//! Plans the tensors of a checkpoint. Linear layers become integers, and all other tensors stay unchanged.

use std::ops::Range;

use anyhow::{Context, Result, bail};
use fancy_regex::Regex;
use model_runtime::{TensorNames, TensorSpec};
use moe_quant::write::{StoredSpec, header, stored};
use moe_quant::{Format, IntFormat, QuantConfig, QuantGroup};
use safetensors::Dtype;
use serde_json::Value;

use crate::exceptions::exceptions;
use crate::settings::{Indivisible, Settings};

/// The number of modules that an error lists.
const LISTED: usize = 5;

/// A linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Its name, which is the name of its tensors without the last part.
    pub module: String,
    /// The part of the source tensor that holds its weights.
    pub part: Part,
    /// The number of outputs.
    pub n: usize,
    /// The number of inputs.
    pub k: usize,
    /// The format in which it is written.
    pub format: Format,
}

/// A part of a stored tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// The whole tensor [n, k].
    Whole,
    /// Some rows of one expert, in a tensor [E, rows, k].
    Expert(usize, Range<usize>),
}

/// A tensor of the source, and its plan.
#[derive(Clone, Debug)]
pub struct Item {
    /// Name and shape in the source.
    pub source: TensorSpec,
    /// Its linear layers. The list is empty for a tensor that is copied.
    pub linears: Vec<Linear>,
}

/// The plan for a checkpoint.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The tensors, in the order of the source. If a tensor becomes two tensors, the second one is at the end.
    pub items: Vec<Item>,
    /// Whether the vocabulary projection, which was tied to the embedding, becomes a matrix of its own.
    pub untied: bool,
    /// The `quantization_config`.
    pub header: Value,
}

impl Item {
    /// Returns the tensors that it becomes if the source tensor has the dtype `dtype`: full name, dtype and shape.
    ///
    /// # Errors
    /// [`stored`] fails.
    pub fn outputs(&self, settings: &Settings, dtype: Dtype) -> Result<Vec<(String, StoredSpec)>> {
        let mut outputs = Vec::new();
        for linear in &self.linears {
            match linear.format {
                // This is one part of a tensor that is split.
                Format::Plain => outputs.push((
                    format!("{}.weight", linear.module),
                    StoredSpec { suffix: "weight", dtype, shape: vec![linear.n, linear.k] },
                )),
                format => {
                    let specs = stored(format, linear.n, linear.k, settings.scale_dtype(dtype))?;
                    outputs.extend(specs.into_iter().map(|s| (format!("{}.{}", linear.module, s.suffix), s)));
                }
            }
        }
        if self.linears.is_empty() {
            let spec = StoredSpec { suffix: "", dtype, shape: self.source.shape.clone() };
            outputs.push((self.source.name.clone(), spec));
        }
        Ok(outputs)
    }
}

/// Plans a model's tensors, whose names are `names`. `is_tied` says whether the vocabulary projection is the embedding.
///
/// # Errors
/// Settings contradict each other, a pattern matches nothing, layers do not divide although that is refused, or there
/// is nothing to quantise.
pub fn plan(
    tensors: Vec<TensorSpec>,
    names: &TensorNames,
    is_tied: bool,
    settings: &Settings,
) -> Result<Plan> {
    let base = settings.base()?;
    let unties = is_tied && settings.lm_head;
    // A tied projection that is stored nevertheless is a copy of the embedding.
    let tensors = tensors.into_iter().filter(|tensor| !(unties && tensor.name == weight_of(names.lm_head)));
    let mut items: Vec<Item> = tensors.map(|source| item(source, names, base, settings.lm_head)).collect();
    if unties {
        items.push(own_head(&items, names, base)?);
    }
    apply_patterns(&mut items, names, &settings.ignore)?;
    apply_sizes(&mut items, settings.indivisible)?;
    // A projection that stays in floats stays tied to the embedding.
    let in_floats = |head: &mut Item| head.linears.iter().all(|linear| linear.format == Format::Plain);
    let untied = unties && items.pop_if(in_floats).is_none();
    for item in &mut items {
        // A matrix that keeps its name and its floats is copied.
        if matches!(item.linears.as_slice(), [Linear { format: Format::Plain, part: Part::Whole, .. }]) {
            item.linears.clear();
        }
    }
    let decided: Vec<(String, Format)> = items.iter().flat_map(|item| decisions(item, names)).collect();
    if decided.iter().all(|(_, format)| *format == Format::Plain) {
        bail!("no linear layer is left to quantise; check `ignore` and `indivisible`")
    }
    let lm_head = settings.lm_head && untied == is_tied;
    let header = header(base, lm_head, &exceptions(&decided, base))?;
    check_header(&header, &decided)?;
    Ok(Plan { items, untied, header })
}

/// Returns the vocabulary projection of a model whose projection is the embedding.
fn own_head(items: &[Item], names: &TensorNames, base: Format) -> Result<Item> {
    let name = weight_of(names.embedding);
    let embedding = items.iter().find(|item| item.source.name == name);
    let Some((source, &[n, k])) = embedding.map(|item| (&item.source, item.source.shape.as_slice())) else {
        bail!("`lm_head`: expected the matrix {name}, of which a projection could be made")
    };
    let head = Linear { module: names.lm_head.to_string(), part: Part::Whole, n, k, format: base };
    Ok(Item { source: source.clone(), linears: vec![head] })
}

fn weight_of(module: &str) -> String {
    format!("{module}.weight")
}

fn item(source: TensorSpec, names: &TensorNames, base: Format, lm_head: bool) -> Item {
    let linears = linears(&source, names, base, lm_head);
    Item { source, linears }
}

/// Returns the linear layers of a tensor. These are the matrices of decoder layers except the gates of the routers, and
/// the vocabulary projection if `lm_head` is set.
fn linears(source: &TensorSpec, names: &TensorNames, base: Format, lm_head: bool) -> Vec<Linear> {
    let linear = |module: String, part, n, k| Linear { module, part, n, k, format: base };
    match *source.shape.as_slice() {
        [n, k] if n * k > 0 => match source.name.strip_suffix(".weight") {
            Some(module) if is_linear(module, names, lm_head) => {
                vec![linear(module.to_string(), Part::Whole, n, k)]
            }
            _ => Vec::new(),
        },
        // The experts are packed into one tensor, as transformers 5 writes them.
        [experts, n, k] => {
            let Some((prefix, last)) = source.name.rsplit_once('.') else { return Vec::new() };
            let matrices = &names.matrices;
            let parts = if last == matrices.packed_gate_up {
                vec![(matrices.gate, 0..n / 2), (matrices.up, n / 2..n)]
            } else if last == matrices.packed_down {
                vec![(matrices.down, 0..n)]
            } else {
                return Vec::new();
            };
            let of_expert = |expert: usize| {
                parts.iter().map(move |(name, rows)| (expert, *name, rows.clone())).collect::<Vec<_>>()
            };
            (0..experts)
                .flat_map(of_expert)
                .map(|(expert, name, rows)| {
                    let n = rows.len();
                    linear(format!("{prefix}.{expert}.{name}"), Part::Expert(expert, rows), n, k)
                })
                .collect()
        }
        _ => Vec::new(),
    }
}

fn is_linear(module: &str, names: &TensorNames, lm_head: bool) -> bool {
    match module.rsplit_once('.') {
        Some((parent, last)) => {
            is_in_layers(parent, names) && last != names.gate && Some(last) != names.shared_expert_gate
        }
        None => module == names.lm_head && lm_head,
    }
}

fn is_in_layers(module: &str, names: &TensorNames) -> bool {
    module.strip_prefix(names.layers).is_some_and(|rest| rest.starts_with('.'))
}

fn apply_patterns(items: &mut [Item], names: &TensorNames, patterns: &[String]) -> Result<()> {
    for pattern in patterns {
        let parts: Vec<_> = pattern.split('*').map(fancy_regex::escape).collect();
        let regex = Regex::new(&format!("^{}$", parts.join(".*"))).context("`ignore`")?;
        let mut found = false;
        for linear in items.iter_mut().flat_map(|item| &mut item.linears) {
            if regex.is_match(&linear.module)? {
                (linear.format, found) = (Format::Plain, true);
            }
        }
        if !found {
            bail!(
                "`ignore` {pattern:?} names no linear layer; names are such as {}.0.{}.{}",
                names.layers,
                names.attention,
                names.grouped_query.q
            )
        }
    }
    Ok(())
}

/// Handles the layers whose sizes the format does not support.
fn apply_sizes(items: &mut [Item], indivisible: Indivisible) -> Result<()> {
    let mut refused = Vec::new();
    let quantised = items.iter_mut().flat_map(|item| &mut item.linears).filter(|l| l.format != Format::Plain);
    for linear in quantised {
        let fits = |format| stored(format, linear.n, linear.k, Dtype::F16);
        let Err(error) = fits(linear.format) else { continue };
        let error = match indivisible {
            Indivisible::Refuse => error,
            Indivisible::Keep => {
                linear.format = Format::Plain;
                continue;
            }
            Indivisible::Channel => match fits(channel(linear.format)) {
                Err(error) => error,
                Ok(_) => {
                    linear.format = channel(linear.format);
                    continue;
                }
            },
        };
        refused.push(format!("\n  {}: {error}", linear.module));
    }
    if refused.is_empty() {
        return Ok(());
    }
    let more = refused.len().saturating_sub(LISTED);
    let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
    let advice = match indivisible {
        Indivisible::Refuse => {
            "use another `group`, or `indivisible` channel (one scale for each of their rows) or keep (floats), or name \
             them in `ignore`"
        }
        _ => "use `indivisible` keep (floats), or name them in `ignore`",
    };
    bail!(
        "{} linear layers do not fit the format:{}{more}\n{advice}",
        refused.len(),
        refused.into_iter().take(LISTED).collect::<String>()
    )
}

fn channel(format: Format) -> Format {
    let by_channel = |int| IntFormat { group: QuantGroup::Channel, act_order: false, ..int };
    match format {
        Format::Gptq { int, zeros } => Format::Gptq { int: by_channel(int), zeros },
        Format::PackQuantized { int } => Format::PackQuantized { int: by_channel(int) },
        other => other,
    }
}

/// Returns the format of every linear layer, including layers that are copied. The header must describe these formats.
fn decisions(item: &Item, names: &TensorNames) -> Vec<(String, Format)> {
    if !item.linears.is_empty() {
        return item.linears.iter().map(|linear| (linear.module.clone(), linear.format)).collect();
    }
    let module = item.source.name.strip_suffix(".weight");
    let copied = module.filter(|name| item.source.shape.len() == 2 && is_in_layers(name, names));
    copied.map(|name| (name.to_string(), Format::Plain)).into_iter().collect()
}

/// Checks that a reader of the header finds the same formats.
fn check_header(header: &Value, decided: &[(String, Format)]) -> Result<()> {
    let read = QuantConfig::from_header("quantization_config", header)?;
    for (module, format) in decided {
        let got = read.format_of(module)?;
        if got != *format {
            bail!("{module}: the header that would be written says {got:?}, but the plan is {format:?}")
        }
    }
    Ok(())
}
