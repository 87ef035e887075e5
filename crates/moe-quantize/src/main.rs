//! `moe-quantize`: quantised and random checkpoints from the command line; `cargo xtask quantize` runs it.
#![forbid(unsafe_code)]

mod format_arg;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_core::DType;
use clap::{Parser, Subcommand, ValueEnum};
use moe_engine::terminal::{note_error, print};
use moe_quant::QuantGroup;
use moe_quantize::{
    Calibration, FileFormat, Indivisible, Method, RandomSettings, Settings, TextSettings, loss, quantize,
    quantize_gguf, random_checkpoint,
};

use format_arg::{FormatArg, Written};

#[derive(Parser)]
#[command(name = "moe-quantize", about = "Makes quantised checkpoints of every family that moe runs")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Quantise a float checkpoint.
    Quantize(QuantizeArgs),
    /// Write random weights of a config's shape, plain or quantised.
    RandomCheckpoint(RandomArgs),
    /// The loss of a checkpoint, quantised or not, on a text, computed in f32.
    Loss(LossArgs),
}

#[derive(clap::Args)]
struct QuantizeArgs {
    /// Checkpoint folder in f32, f16 or bf16.
    model: PathBuf,
    /// Folder to write, or GGUF file; it must not exist.
    out: PathBuf,
    #[command(flatten)]
    scheme: Scheme,
    /// File format.
    #[arg(long, value_enum)]
    format: FormatArg,
    /// How integers are chosen: each weight to the nearest value, or calibrated by GPTQ.
    #[arg(long, value_enum, default_value = "rtn")]
    method: MethodArg,
    /// Order columns by the size of their inputs (act-order); with GPTQ.
    #[arg(long)]
    desc_act: bool,
    /// Text that GPTQ calibrates on.
    #[arg(long, value_name = "TEXT", required_if_eq("method", "gptq"))]
    calibration: Option<PathBuf>,
    #[command(flatten)]
    windows: Windows,
    /// Share of the mean of the Hessian's diagonal that is added to it.
    #[arg(long, default_value_t = 0.01, allow_negative_numbers = true, value_parser = damping)]
    damping: f64,
    /// Tokens that an expert must see to be calibrated; one that sees fewer is rounded to nearest.
    #[arg(long, default_value_t = 128)]
    min_tokens: usize,
}

#[derive(clap::Args)]
struct LossArgs {
    /// Checkpoint folder.
    model: PathBuf,
    /// The text, in UTF-8.
    text: PathBuf,
    /// A checkpoint, usually the float one, from whose predictions the divergence is measured.
    #[arg(long, value_name = "MODEL")]
    reference: Option<PathBuf>,
    #[command(flatten)]
    windows: Windows,
}

/// Which part of a text is read.
#[derive(clap::Args)]
struct Windows {
    /// Windows of the text, spread evenly over it.
    #[arg(long, default_value_t = 128)]
    samples: usize,
    /// Tokens of a window.
    #[arg(long, default_value_t = 512)]
    length: usize,
}

impl Windows {
    fn of(&self, file: &Path) -> TextSettings {
        TextSettings { file: file.to_path_buf(), samples: self.samples, length: self.length }
    }
}

#[derive(clap::Args)]
struct RandomArgs {
    /// A config.json, or a folder with one, whose tokenizer is then copied.
    config: PathBuf,
    /// Folder to write; it must not exist.
    out: PathBuf,
    #[command(flatten)]
    scheme: Scheme,
    /// File format; plain: floats.
    #[arg(long, value_enum)]
    format: RandomFormat,
    /// Groups of columns in a random order (act-order).
    #[arg(long)]
    desc_act: bool,
    /// Dtype of floats (default: the config's, else bf16).
    #[arg(long, value_enum)]
    dtype: Option<DTypeArg>,
    /// Layers, in the place of the config's.
    #[arg(long)]
    layers: Option<usize>,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// The options that `quantize` and `random-checkpoint` have in common.
#[derive(clap::Args)]
struct Scheme {
    /// Bits of an integer: 4 or 8 (default: 4).
    #[arg(long)]
    bits: Option<u8>,
    /// Columns that share a scale: 32, 64, 128, or -1 for whole rows (default: 128; MXFP4 has 32, NVFP4 16).
    #[arg(long, allow_negative_numbers = true, value_parser = group)]
    group_size: Option<QuantGroup>,
    /// Groups without zero points (the default).
    #[arg(long, overrides_with = "asym")]
    sym: bool,
    /// Groups with zero points of their own.
    #[arg(long)]
    asym: bool,
    /// Quantise the vocabulary projection too. Where it is the embedding, the embedding stays in floats, and the
    /// projection becomes a matrix of its own.
    #[arg(long)]
    quantise_lm_head: bool,
    /// Modules that stay in floats, such as 'model.layers.*.self_attn.*'; may be repeated.
    #[arg(long, value_name = "PATTERN")]
    ignore: Vec<String>,
    /// What becomes of layers whose sizes do not divide (default: refuse).
    #[arg(long, value_enum)]
    indivisible: Option<IndivisibleArg>,
}

impl QuantizeArgs {
    /// Fails if a flag is given that has no meaning for GGUF files.
    fn check_gguf(&self) -> anyhow::Result<()> {
        let Scheme { bits, group_size, sym, asym, quantise_lm_head, ignore, indivisible } = &self.scheme;
        let given = [
            ("--bits", bits.is_some()),
            ("--group-size", group_size.is_some()),
            ("--sym", *sym),
            ("--asym", *asym),
            ("--quantise-lm-head", *quantise_lm_head),
            ("--ignore", !ignore.is_empty()),
            ("--indivisible", indivisible.is_some()),
            ("--method gptq", matches!(self.method, MethodArg::Gptq)),
            ("--calibration", self.calibration.is_some()),
            ("--desc-act", self.desc_act),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                anyhow::bail!(
                    "{flag} has no meaning for GGUF files, whose format fixes the type of each tensor"
                )
            }
            None => Ok(()),
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum RandomFormat {
    Plain,
    Gptq,
    CompressedTensors,
}

#[derive(Clone, Copy, ValueEnum)]
enum MethodArg {
    Rtn,
    Gptq,
}

#[derive(Clone, Copy, ValueEnum)]
enum IndivisibleArg {
    /// The command fails with an error that lists the layers.
    Refuse,
    /// The layers stay in floats.
    Keep,
    /// Each row of such a layer gets one scale.
    Channel,
}

#[derive(Clone, Copy, ValueEnum)]
enum DTypeArg {
    F32,
    F16,
    Bf16,
}

/// Parses a group size that the kernels support.
fn group(text: &str) -> Result<QuantGroup, String> {
    match text {
        "-1" => Ok(QuantGroup::Channel),
        "32" | "64" | "128" => text.parse().map(QuantGroup::Size).map_err(|_| text.to_string()),
        _ => Err("expected 32, 64, 128 or -1".to_string()),
    }
}

/// Parses a damping, which must be finite and not negative.
fn damping(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|share: &f64| share.is_finite() && *share >= 0.0);
    number.ok_or_else(|| "expected a finite number of at least 0, such as 0.01".to_string())
}

impl Scheme {
    fn settings(&self, format: FileFormat, method: Method, desc_act: bool) -> Settings {
        Settings {
            format,
            bits: self.bits.unwrap_or(4),
            group: self.group_size.unwrap_or(format.usual_group()),
            symmetric: !self.asym,
            desc_act,
            method,
            lm_head: self.quantise_lm_head,
            ignore: self.ignore.clone(),
            indivisible: match self.indivisible {
                None | Some(IndivisibleArg::Refuse) => Indivisible::Refuse,
                Some(IndivisibleArg::Keep) => Indivisible::Keep,
                Some(IndivisibleArg::Channel) => Indivisible::Channel,
            },
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    match &cli.command {
        Command::Quantize(args) => {
            let format = match args.format.written() {
                Written::Folder(format) => format,
                Written::Gguf(mix) => {
                    args.check_gguf()?;
                    let report = quantize_gguf(&args.model, &args.out, mix)?;
                    print(&format!("{}: {}\n", args.out.display(), report.text()))?;
                    return Ok(());
                }
            };
            let method = match (args.method, &args.calibration) {
                (MethodArg::Gptq, Some(text)) => Method::Gptq(Calibration {
                    text: args.windows.of(text),
                    damping: args.damping,
                    min_tokens: args.min_tokens,
                }),
                _ => Method::Rtn,
            };
            let settings = args.scheme.settings(format, method, args.desc_act);
            let report = quantize(&args.model, &args.out, &settings)?;
            print(&format!("{}: {}\n", args.out.display(), report.text()))?;
        }
        Command::RandomCheckpoint(args) => {
            let format = match args.format {
                RandomFormat::Plain => None,
                RandomFormat::Gptq => Some(FileFormat::Gptq),
                RandomFormat::CompressedTensors => Some(FileFormat::CompressedTensors),
            };
            let settings = RandomSettings {
                quantised: format.map(|format| args.scheme.settings(format, Method::Rtn, args.desc_act)),
                dtype: args.dtype.map(|dtype| match dtype {
                    DTypeArg::F32 => DType::F32,
                    DTypeArg::F16 => DType::F16,
                    DTypeArg::Bf16 => DType::BF16,
                }),
                layers: args.layers,
                seed: args.seed,
            };
            random_checkpoint(&args.config, &args.out, &settings)?;
            print(&format!("{} written\n", args.out.display()))?;
        }
        Command::Loss(args) => {
            let loss = loss(&args.model, args.reference.as_deref(), &args.windows.of(&args.text))?;
            print(&format!("{:.4} nats per token over {} tokens\n", loss.nats_per_token, loss.tokens))?;
            if let Some(divergence) = loss.divergence {
                print(&format!("{divergence:.5} nats of divergence from the reference's predictions\n"))?;
            }
        }
    }
    Ok(())
}

/// The names of settings in messages of the library, and the flags that set them.
const FLAGS: [(&str, &str); 12] = [
    ("`bits`", "--bits"),
    ("`desc_act`", "--desc-act"),
    ("`format`", "--format"),
    ("a `group` of", "--group-size"),
    ("`group`", "--group-size"),
    ("`ignore`", "--ignore"),
    ("`indivisible`", "--indivisible"),
    ("`length`", "--length"),
    ("`lm_head`: expected", "--quantise-lm-head: expected"),
    ("`method`", "--method"),
    ("`samples`", "--samples"),
    ("`symmetric` false", "--asym"),
];

/// Rewrites a message of the library for a user of the command line.
fn as_flags(message: String) -> String {
    FLAGS.iter().fold(message, |text, (setting, flag)| text.replace(setting, flag))
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note_error(format_args!("{}", as_flags(format!("{error:#}"))));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_library_are_told_in_flags() {
        let told = |message: &str| as_flags(message.to_string());
        assert_eq!(
            told("`desc_act`: no groups to order; use a `group` of 32, 64 or 128"),
            "--desc-act: no groups to order; use --group-size 32, 64 or 128"
        );
        assert_eq!(
            told("`symmetric` false: x; `samples` 3 of `length` 4"),
            "--asym: x; --samples 3 of --length 4"
        );
        // Each flag of the table is one of the program.
        for (_, flag) in FLAGS {
            let flag = flag.split(':').next().unwrap();
            let tried = Cli::try_parse_from(["moe-quantize", "quantize", "in", "out", flag]);
            let error = tried.map(drop).unwrap_err().to_string();
            assert!(!error.contains("unexpected argument"), "{flag}: {error}");
        }
    }

    #[test]
    fn flags_of_other_formats_are_refused_for_gguf() {
        let check = |flags: &[&str]| {
            let args = ["moe-quantize", "quantize", "in", "out.gguf", "--format", "gguf:Q4_K_M"];
            match Cli::try_parse_from([&args[..], flags].concat()).unwrap().command {
                Command::Quantize(args) => args.check_gguf().map_err(|error| error.to_string()),
                _ => panic!("another command"),
            }
        };
        assert_eq!(check(&[]), Ok(()));
        for flags in [
            &["--bits", "4"][..],
            &["--group-size", "32"],
            &["--asym"],
            &["--quantise-lm-head"],
            &["--ignore", "x"],
            &["--indivisible", "keep"],
            &["--method", "gptq", "--calibration", "x"],
            &["--desc-act"],
        ] {
            let error = check(flags).unwrap_err();
            assert!(error.starts_with(flags[0]) && error.contains("no meaning for GGUF"), "{error}");
        }
    }

    #[test]
    fn damping_is_a_share() {
        let parse = |damping: &str| {
            let args = ["moe-quantize", "quantize", "in", "out", "--format", "gptq", "--damping", damping];
            match Cli::try_parse_from(args).map(|cli| cli.command) {
                Ok(Command::Quantize(args)) => Ok(args.damping),
                Ok(_) => Err("another command".to_string()),
                Err(error) => Err(error.to_string()),
            }
        };
        assert_eq!([parse("0"), parse("0.05"), parse("1e-3")], [Ok(0.0), Ok(0.05), Ok(1e-3)]);
        for damping in ["NaN", "inf", "-0.01", "much"] {
            let error = parse(damping).unwrap_err();
            assert!(error.contains("expected a finite number of at least 0"), "{error}");
        }
    }
}
