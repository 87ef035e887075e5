//! Replaces the names of settings in messages of libraries by flags.
//! Libraries do not know the command line. Their messages name a setting as it is called in their structs, in
//! backticks. A user reads the name of the flag instead: on a terminal, in the log and in a file of results.

use std::borrow::Cow;
use std::io::{self, Write};

/// The text in messages of libraries, and the text for the command line.
const FLAGS: [(&str, &str); 48] = [
    ("`backend`", "--moe-ep-backend"),
    ("`batch_invariant`", "--batch-invariant"),
    ("`block_size`", "--block-size"),
    ("`chunked_moe_size`", "--chunked-moe-size"),
    ("`cpu_isa`", "--cpu-isa"),
    ("`deepep_mode`", "--deepep-mode"),
    ("`dequantise`", "--dequantise"),
    ("`device`", "--device"),
    ("`dp`", "--dp"),
    // A key of config.json has the same name, so only this name with a space after it is replaced.
    ("`dtype` ", "--dtype "),
    ("`enable_chunked_moe`", "--enable-chunked-moe"),
    ("`enable_expert_parallel`", "--enable-expert-parallel"),
    ("`eplb.bytes_per_step`", "--eplb-bytes-per-step"),
    ("`eplb.interval`", "--eplb-interval"),
    ("`eplb.max_moves`", "--eplb-max-moves"),
    ("`eplb.min_gain`", "--eplb-min-gain"),
    ("`eplb.move_timeout`", "--eplb-move-timeout"),
    ("`eplb.plan_steps`", "--eplb-plan-steps"),
    ("`eplb.window`", "--eplb-window"),
    ("`eplb`", "--enable-eplb"),
    ("`executor`", "--distributed-executor-backend"),
    ("`expert_heat`", "--expert-heat"),
    ("`expert_map`", "--expert-map"),
    ("`expert_offload`", "--expert-offload"),
    ("`force_balance`", "--force-balance"),
    ("`fp8_activations`", "--fp8-activations"),
    ("`gpu_memory`", "--gpu-memory"),
    ("`kv_cache_memory`", "--kv-cache-memory"),
    ("`max_model_len`", "--max-model-len"),
    ("`max_num_batched_tokens`", "--max-num-batched-tokens"),
    ("`max_num_seqs`", "--max-num-seqs"),
    ("`max_tokens`", "--max-new-tokens"),
    ("`mla`", "--mla"),
    ("`model`", "--model"),
    ("`moe_backend`", "--moe-backend"),
    ("`moe_memory_budget`", "--moe-memory-budget"),
    ("`moe_path`", "--moe-path"),
    ("`num_redundant_experts`", "--num-redundant-experts"),
    ("`num_threads`", "--num-threads"),
    ("`placement`", "--expert-placement-strategy"),
    ("`prefix_state_memory`", "--prefix-state-memory"),
    ("`replicas`", "--expert-replicas"),
    ("`shared_experts_stream`", "--shared-experts-stream"),
    ("`skip_memory_check`", "--skip-memory-check"),
    ("`tp`", "--tp"),
    ("leave out this check (`check_memory`)", "add --skip-memory-check"),
    ("a run over token ids needs no tokenizer", "--skip-tokenizer-init runs token ids"),
    ("with the features `cuda` and `nccl`", "with --features cuda,nccl"),
];

/// Rewrites a library's message for a user of the command line.
pub fn as_flags(message: &str) -> Cow<'_, str> {
    FLAGS.iter().fold(Cow::Borrowed(message), |text, (setting, flag)| {
        if text.contains(setting) { Cow::Owned(text.replace(setting, flag)) } else { text }
    })
}

/// The target of a log in whose lines settings are named as flags.
pub struct InFlags<W>(pub W);

impl<W: Write> Write for InFlags<W> {
    /// Writes a message. The log passes each message as a whole.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.0.write_all(as_flags(text).as_bytes())?,
            Err(_) => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn settings_become_flags() {
        let said = "`max_num_seqs` 0: expected 1 to 65535; raise `kv_cache_memory`";
        assert_eq!(as_flags(said), "--max-num-seqs 0: expected 1 to 65535; raise --kv-cache-memory");
        let key = "config.json: `dtype`: expected a string, got 3";
        assert!(matches!(as_flags(key), Cow::Borrowed(text) if text == key));
        let mut log = InFlags(Vec::new());
        log.write_all("WARN drop `eplb`\n".as_bytes()).unwrap();
        assert_eq!(log.0, b"WARN drop --enable-eplb\n");
    }

    #[test]
    fn every_flag_of_the_table_exists() {
        let command = crate::cli::Cli::command();
        let known: Vec<String> = command
            .get_subcommands()
            .flat_map(|command| command.get_arguments().filter_map(|arg| arg.get_long()))
            .map(|long| format!("--{long}"))
            .collect();
        for (setting, flag) in FLAGS {
            let named: Vec<_> = flag.split(' ').filter(|word| word.starts_with("--")).collect();
            let is_known = |word: &str| word == "--features" || known.iter().any(|known| known == word);
            let all = named.iter().all(|word| is_known(word));
            assert!(all && !named.is_empty(), "{setting}: {flag}");
        }
    }
}
