"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.clipping.captions import histogram_numbers, norm_numbers
from workbench.topics.clipping.diagnose import diagnose_clipping
from workbench.topics.clipping.figures import plot_clipping
from workbench.topics.clipping.grad_norm_figures import plot_grad_norm, plot_grad_norm_histogram

__all__ = ["TOPIC"]


TOPIC = Topic(
    name="clipping",
    figures=(
        Figure(
            name="grad-norm",
            shows="L2 norm of the gradient before clipping against step, for the baseline.",
            caption="Single spikes far above the band are outlier batches or the start of an instability.",
            codes=("clipping.threshold", "stability.spike"),
            draw=plot_grad_norm,
            numbers=norm_numbers,
            alone=True,
        ),
        Figure(
            name="grad-norm-histogram",
            shows="Histogram of the gradient norms of all steps of the baseline.",
            caption="A good clipping threshold stands just right of the hump; to its left it would clip most steps and act as a "
            "lower learning rate.",
            codes=("clipping.threshold", "clipping.aggressive"),
            draw=plot_grad_norm_histogram,
            numbers=histogram_numbers,
            alone=True,
        ),
        Figure(
            name="clipping",
            shows="Training loss at the end of each clipped run against its threshold, with the share of clipped steps.",
            caption="A good threshold clips about a tenth of the steps; hollow points clip half or more, which is an odd way to lower "
            "the learning rate.",
            codes=("clipping.cures", "clipping.aggressive"),
            draw=plot_clipping,
        ),
    ),
    studies={
        "clipping": StudyKind(diagnose=diagnose_clipping, pictures=("clipping", "loss-curves")),
    },
)
