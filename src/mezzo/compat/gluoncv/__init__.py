"""gluoncv on torch: `model_zoo.get_model` for ResNet v1 and SSD, and `loss.SSDMultiBoxLoss`.

>>> import mezzo.compat.gluoncv as gcv
>>> gcv.model_zoo.get_model("resnet18_v1", classes=10).output
Dense(in_features=512, out_features=10, bias=True)
"""

from mezzo.compat._missing import module_getattr
from mezzo.compat.gluoncv import loss, model_zoo, utils
from mezzo.compat.gluoncv._substitutions import SUBSTITUTIONS

__all__ = ["loss", "model_zoo", "utils"]

__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
