//! How many experts are in host memory, and the cost of that.

use moe_kernels::candle::Result;

use crate::error::refuse;

const GIB: f64 = (1u64 << 30) as f64;

/// How many experts of each layer are in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertOffload {
    /// How many experts of a layer are in host memory.
    pub experts: usize,
    /// The number of experts of a layer, and the number of experts that a token chooses.
    pub of: (usize, usize),
    /// Bytes of an expert.
    pub expert_bytes: usize,
    /// The number of layers with experts.
    pub layers: usize,
}

impl ExpertOffload {
    /// Returns the largest offload within `bytes`, with the same number of experts of each layer. `experts` and `top_k`
    /// count per layer.
    ///
    /// # Errors
    /// Too few bytes for one expert of each layer; too many bytes, which would leave a token's experts no place on the
    /// device.
    pub fn within(
        bytes: usize,
        (experts, top_k): (usize, usize),
        expert_bytes: usize,
        layers: usize,
    ) -> Result<Self> {
        let each = layers * expert_bytes;
        let most = experts.saturating_sub(top_k.max(1));
        let gib = |experts: usize| (experts * each) as f64 / GIB;
        let Some(count) = bytes.checked_div(each).filter(|_| most > 0) else {
            refuse!(Offload, "`expert_offload`: this model has no experts that a step could do without")
        };
        if count == 0 {
            refuse!(
                Offload,
                "`expert_offload`: expected at least {:.3} GiB, one expert of each of the {layers} layers, got {:.3}",
                gib(1),
                bytes as f64 / GIB
            )
        }
        if count > most {
            refuse!(
                Offload,
                "`expert_offload`: expected at most {:.2} GiB, since {top_k} of {experts} experts of a layer, as many as a token \
                 chooses, must stay on the device; got {:.2}",
                gib(most),
                bytes as f64 / GIB
            )
        }
        Ok(Self { experts: count, of: (experts, top_k), expert_bytes, layers })
    }

    /// The bytes of host memory.
    pub fn bytes(&self) -> usize {
        self.experts * self.expert_bytes * self.layers
    }

    /// The bytes that a step of `rows` rows is expected to copy to the device if all experts are equally likely; it
    /// copies as many from the device. If some experts are popular, there are fewer.
    pub fn uniform_step_bytes(&self, rows: usize) -> f64 {
        let (experts, top_k) = self.of;
        let missed_by_all = (1.0 - top_k as f64 / experts as f64).powf(rows as f64);
        self.bytes() as f64 * (1.0 - missed_by_all)
    }

    /// Describes the offload and its cost at a bus rate of `bytes_per_second`.
    pub(crate) fn describe(&self, bytes_per_second: f64) -> String {
        let step = |rows: usize| {
            let bytes = self.uniform_step_bytes(rows);
            let seconds = bytes / bytes_per_second;
            format!(
                "{rows} rows {:.2} GB, {:.1} ms, {:.0} tok/s",
                bytes / 1e9,
                1e3 * seconds,
                rows as f64 / seconds
            )
        };
        format!(
            "{} of {} experts of each of {} layers are in host memory, {:.1} GiB; they change places with others at {:.1} GB/s each \
             way. Where all experts are equally likely a step costs at least: {}; {}; {}",
            self.experts,
            self.of.0,
            self.layers,
            self.bytes() as f64 / GIB,
            bytes_per_second / 1e9,
            step(1),
            step(8),
            step(64)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Qwen3-30B-A3B: 48 layers of 128 experts of 9.4 MB, of which a token chooses 8.
    fn qwen3(gib: f64) -> Result<ExpertOffload> {
        ExpertOffload::within((gib * GIB) as usize, (128, 8), 3 * 2048 * 768 * 2, 48)
    }

    #[test]
    fn half_of_the_experts_in_host_memory() {
        let half = qwen3(27.0).unwrap();
        assert_eq!((half.experts, half.bytes()), (64, 27 << 30));
        assert_eq!(qwen3(27.4).unwrap(), half);
        // One row needs 8 experts per layer, half of which are in host memory.
        assert!((half.uniform_step_bytes(1) - 48.0 * 4.0 * 9_437_184.0).abs() < 1.0);
        let all = half.uniform_step_bytes(1000);
        assert!((all - half.bytes() as f64).abs() < 1e6, "{all}");
        let said = half.describe(50e9);
        assert!(
            said.starts_with("64 of 128 experts of each of 48 layers are in host memory, 27.0 GiB"),
            "{said}"
        );
        assert!(said.contains("1 rows 1.81 GB, 36.2 ms, 28 tok/s"), "{said}");
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_limit() {
        for (gib, said) in [
            (0.1, "expected at least 0.422 GiB, one expert of each of the 48 layers, got 0.100"),
            (54.0, "GiB, since 8 of 128 experts of a layer"),
        ] {
            let error = qwen3(gib).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        for (experts, layers) in [((8, 8), 4), ((8, 2), 0)] {
            let error = ExpertOffload::within(1 << 30, experts, 1000, layers).unwrap_err().to_string();
            assert!(error.contains("has no experts that a step could do without"), "{error}");
        }
    }
}
